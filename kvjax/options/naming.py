"""Methods by name: a method or a preset, then its options after colons."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvjax.errors import InputError
from kvjax.options.bounds import check_choice


def named[M](
  name: str, makers: Mapping[str, Callable[[], M]], presets: Mapping[str, M]
) -> M:
  """What a name such as `keydiff:anchor=median_unit` stands for.

  Args:
    name: of a maker or a preset, then options, each after a colon. The values
      of a list are joined by plus signs: `skip_layers=0+1`; `skip_layers=` is
      the empty list.
    makers: by name.
    presets: by name.

  Raises:
    InputError: no such method, preset or option, or a value out of range.
  """
  base, *options = name.split(":")
  if base in presets:
    method = presets[base]
  elif base in makers:
    method = makers[base]()
  else:
    raise InputError(
      f"There is no method {base!r}{near(base, [*makers, *presets])}; the "
      f"methods are {', '.join(makers)}."
    )
  given: dict[str, Any] = {}
  for text in options:
    option, value = _option(base, method, text)
    if option in given:
      raise InputError(f"Option {option!r} of {base!r} is given twice.")
    given[option] = value
  changed: M = dataclasses.replace(method, **given)  # type: ignore[type-var]
  return changed


def _option(base: str, method: Any, text: str) -> tuple[str, Any]:
  """One `name=value`, read as the type of the field's present value."""
  name, equals, value = text.partition("=")
  fields = [
    field.name
    for field in dataclasses.fields(method)
    if not dataclasses.is_dataclass(getattr(method, field.name))
  ]
  if name not in fields:
    raise InputError(
      f"Method {base!r} has no option {name!r}{near(name, fields)}; it has "
      f"{', '.join(fields) or 'none'}."
    )
  if not equals:
    raise InputError(f"Option {name!r} of {base!r} needs a value: {name}=...")
  read = _read(base, name, value, getattr(method, name))
  check_choice(type(method), name, read)
  return name, read


def _read(base: str, name: str, value: str, present: Any) -> Any:
  kind = type(present)
  try:
    if kind is tuple:
      return tuple(_number(int, part) for part in value.split("+") if part)
    if kind is bool:
      return {"true": True, "false": False}[value.lower()]
    return value if kind is str else _number(kind, value)
  except (ValueError, KeyError) as error:
    example = (
      "+".join(map(str, present or (0, 1))) if kind is tuple else present
    )
    raise InputError(
      f"Option {name!r} of {base!r} takes a value such as {example!r}; "
      f"{value!r} is not one."
    ) from error


def _number(kind: type[int] | type[float], text: str) -> int | float:
  """A number that fits an array's int32 or float32."""
  number = kind(text)
  if not abs(number) < 2**31:  # infinite and NaN do not either
    raise ValueError
  return number


def near(word: str, known: Iterable[str]) -> str:
  """What may have been meant, in brackets; empty if nothing is alike."""
  close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
  return f" (did you mean {' or '.join(close)}?)" if close else ""
