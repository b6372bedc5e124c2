"""Checks of what JSON files hold against the types of dataclasses."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# Numbers that a float can represent, as sums of them can.
_LARGEST = 2**63


def make[Record](kind: type[Record], fields: Any) -> Record:
  """Makes a record of a file's fields; others are passed over.

  Raises:
    ValueError: it is no object, or a field is of another type than the
      dataclass says, or is missing and has no default; the error's text says
      which.
  """
  assert dataclasses.is_dataclass(kind)
  present = fields.keys() if isinstance(fields, dict) else ()
  names = [
    field.name
    for field in dataclasses.fields(kind)
    if field.name in present or _is_required(field)
  ]
  hints = get_type_hints(kind)
  check(fields, {name: hints[name] for name in names})
  return kind(**{name: fields[name] for name in names})


def _is_required(field: dataclasses.Field[Any]) -> bool:
  unset = dataclasses.MISSING
  return field.default is unset and field.default_factory is unset


def check(fields: Any, hints: Mapping[str, Any]) -> None:
  """Checks the fields of an object.

  Args:
    fields: what `json.loads` returns.
    hints: the type of each field that it must have; see `fits`.

  Raises:
    ValueError: as for `make`.
  """
  if not isinstance(fields, dict):
    raise ValueError(f"{fields!r:.40} is no object")
  for name, hint in hints.items():
    if name not in fields:
      raise ValueError(f"{name!r} is missing")
    if not fits(fields[name], hint):
      raise ValueError(f"{name!r} is {fields[name]!r:.40}")


def fits(value: Any, hint: Any) -> bool:
  """Whether a value of a JSON file is of a type.

  A number may be whole where a float is wanted. It must be finite and not huge,
  and a truth value is none.

  Args:
    value: what `json.loads` returns.
    hint: str, int, float, bool, None, Any, a list or a mapping of such a
      type, a union of them, or a `Literal`.
  """
  origin, arguments = get_origin(hint), get_args(hint)
  if origin in (Union, types.UnionType):
    return any(fits(value, one) for one in arguments)
  if origin is Literal:
    return value in arguments
  if origin is list:
    return isinstance(value, list) and all(
      fits(item, arguments[0]) for item in value
    )
  if origin in (dict, Mapping):
    return isinstance(value, dict) and all(
      fits(item, arguments[1]) for item in value.values()
    )
  if hint is float:  # NaN is not below anything.
    return type(value) in (int, float) and abs(value) < _LARGEST
  if hint is int:
    return type(value) is int and abs(value) < _LARGEST
  return hint is Any or type(value) is (
    types.NoneType if hint is None else hint
  )
