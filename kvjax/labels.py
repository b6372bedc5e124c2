"""What users call methods, for messages."""

import dataclasses
from typing import Any

# Classes of a method or an allocation, from the outer to the innermost.
_Shape = tuple[type, ...]

_NAMES: dict[tuple[_Shape, _Shape], str] = {}
_PREFIXES: dict[type, str] = {}


def add_name(name: str, method: Any, allocation: Any = None) -> None:
  """Lets messages call methods of these classes by a name.

  Their first name stays.

  Args:
    name: the name.
    method: an eviction or a retrieval method, with any options.
    allocation: the allocation that belongs to the name, if any.
  """
  _NAMES.setdefault((_shape(method), _shape(allocation)), name)


def add_prefix(name: str, outer: type) -> None:
  """Lets messages call what a class puts around a method by a name."""
  _PREFIXES[outer] = name


def name_of(method: Any, allocation: Any = None) -> str:
  """What users call a method, without its options: `finch` or `ada/keydiff`.

  Classes that nobody has registered go by their own names: `finch by Mine`.

  Args:
    method: an eviction or a retrieval method.
    allocation: the allocation of its budget; None for the method's default.
  """
  shape = _shape(method)
  name = _NAMES.get((shape, _shape(allocation)))
  if name is not None:
    return name
  if allocation is not None:
    kinds = _shape(allocation)
    if kinds[0] not in _PREFIXES:
      return f"{name_of(method)} by {kinds[0].__name__}"
    before = [_PREFIXES[kind] for kind in kinds if kind in _PREFIXES]
    return "/".join([*before, name_of(method)])
  outer = _PREFIXES.get(shape[0], shape[0].__name__)
  return f"{outer}/{name_of(method.over)}" if shape[1:] else outer


def _shape(part: Any) -> _Shape:
  if part is None:
    return ()
  over = getattr(part, "over", None)
  inner = _shape(over) if dataclasses.is_dataclass(over) else ()
  return (type(part), *inner)
