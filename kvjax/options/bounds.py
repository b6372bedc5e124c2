"""Checks of a method's options; NaN fails all of them."""

import dataclasses
import functools
import numbers
import operator
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvjax.errors import InputError


def check_least(method: Any, **least: float) -> None:
  """Refuses options of a method that are below their minimum.

  Raises:
    InputError: one is; the message names it.
  """
  for name, bound in least.items():
    value = getattr(method, name)
    # Not `<`, which is false for NaN.
    if not value >= bound:
      raise InputError(f"{name} must be {bound:g} or more; {value} is not.")


def check_used(method: Any, decisive: str, *unused: str) -> None:
  """Refuses options that the present value of another one leaves unused.

  Args:
    method: the method.
    decisive: the other option.
    unused: the options, which must have their defaults.

  Raises:
    InputError: one has another value; the message names it and `decisive`.
  """
  for field in dataclasses.fields(method):
    value = getattr(method, field.name)
    if field.name in unused and value != field.default:
      raise InputError(
        f"{field.name}={value} changes nothing with "
        f"{decisive}={getattr(method, decisive)}; leave it out, or change "
        f"{decisive}."
      )


def check_count(name: str, value: object, least: int = 1) -> None:
  """Refuses what is not a whole number of at least `least`, or of 32 bits.

  Raises:
    InputError: it is not; the message names it.
  """
  number = check_whole(name, value, least)
  if number >= 2**31:
    raise InputError(f"{name} must be below {2**31}; {number} is not.")


def check_whole(name: str, value: object, least: int) -> int:
  """Refuses what is not a whole number of at least `least`.

  Returns:
    The number.

  Raises:
    InputError: it is not; the message names it.
  """
  try:
    # NumPy's integers pass, floats do not.
    number = operator.index(value)  # type: ignore[arg-type]
  except TypeError:
    number = least - 1
  if isinstance(value, bool):
    number = least - 1
  if number < least:
    raise InputError(
      f"{name} must be a whole number, {least} or more; {value!r} is not."
    )
  return number


def check_number(name: str, value: object) -> None:
  """Refuses what is not a number.

  Raises:
    InputError: it is not; the message names it.
  """
  if not isinstance(value, numbers.Real) or isinstance(value, bool):
    raise InputError(f"{name} must be a number; {value!r} is not.")


def check_odd(method: Any, name: str) -> None:
  """Refuses a width that is not odd.

  Raises:
    InputError: it is even, or below 1.
  """
  value = getattr(method, name)
  if not (value >= 1 and value % 2 == 1):
    raise InputError(f"{name} must be odd and 1 or more; {value} is not.")


def check_share(method: Any, name: str) -> None:
  """Refuses a value that is not a share.

  Raises:
    InputError: it is not between 0 and 1.
  """
  value = getattr(method, name)
  if not 0 <= value <= 1:
    raise InputError(f"{name} must be between 0 and 1; {value:g} is not.")


def check_layers(method: Any, name: str) -> None:
  """Makes an option that lists layers a tuple, as methods are hashable.

  Raises:
    InputError: it is no list, or a number is negative.
  """
  given = getattr(method, name)
  try:
    listed = None if isinstance(given, str | bytes) else list(given)
  except TypeError:
    listed = None
  if listed is None:
    raise InputError(
      f"{name} is a list of layers, as in (0, 1), not {given!r}."
    )
  for layer in listed:
    try:
      check_count(name, layer, 0)
    except InputError:
      raise InputError(
        f"{name} are numbers of layers, 0 for the first; {layer!r} is not one."
      ) from None
  # NumPy's numbers cannot be saved.
  object.__setattr__(method, name, tuple(map(operator.index, listed)))


def check_options(method: Any) -> None:
  """Refuses options of a wrong type, or that are not among the choices.

  Whole numbers of NumPy become Python's: others cannot be saved.

  Raises:
    InputError: an option is no number, no whole one of 32 bits, not true or
      false, or none of the choices, as its annotation says; the message names
      it.
  """
  made: type = type(method)
  hints = _hints(made)
  for name in (field.name for field in dataclasses.fields(method)):
    kind, value = hints.get(name), getattr(method, name)
    if kind is int:
      object.__setattr__(method, name, _whole(name, value))
    elif kind is float:
      check_number(name, value)
    elif kind is bool and not isinstance(value, bool):
      raise InputError(f"{name} must be True or False; {value!r} is not.")
    else:
      check_choice(made, name, value)


def check_value(made: Any) -> None:
  """Refuses a value that compiled programs cannot tell from another one.

  They are found by its fields, which must be hashable, and hold all of it. What
  a frozen dataclass derives from its fields has a name that starts with an
  underscore.

  Raises:
    InputError: it, or a part, is not a frozen dataclass, or holds more than its
      fields.
  """
  name = type(made).__name__
  fields = {field.name: field for field in dataclasses.fields(made)}
  derives = "__dataclass_fields__" in vars(type(made))
  for hidden in getattr(made, "__dict__", {}):
    cached = getattr(type(made), hidden, None)
    if (
      hidden in fields
      or (derives and hidden.startswith("_"))
      or isinstance(cached, functools.cached_property)
    ):
      continue
    raise InputError(
      f"{name} holds {hidden!r}, which is no field, so that its values look "
      "alike; write @dataclasses.dataclass(frozen=True) before the class, and "
      f"a field such as {hidden}: float = 1.0 instead of __init__."
    )
  for field_name, field in fields.items():
    value = getattr(made, field_name)
    if field.init and not (field.compare and field.hash is not False):
      raise InputError(
        f"The field {field_name!r} of {name} is left out of comparisons, so "
        "that its values look alike; leave out compare=False and hash=False."
      )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
      check_value(value)
    try:
      hash(value)
    except TypeError as error:
      kind = type(value).__name__
      raise InputError(
        f"The field {field_name!r} of {name} is a {kind}, which has no hash; "
        "give a number, a text or a tuple of them, and load arrays in `load`."
      ) from error
  try:
    hash(made)
  except TypeError as error:
    raise InputError(
      f"{name} has no hash; write @dataclasses.dataclass(frozen=True) before "
      "the class."
    ) from error


def _whole(name: str, value: Any) -> int:
  try:
    number = operator.index(value)
  except TypeError:
    number = 2**31
  if not abs(number) < 2**31:
    raise InputError(
      f"{name} must be a whole number of 32 bits; {value!r} is not."
    )
  return number


def check_choice(method: type, option: str, value: object) -> None:
  """Refuses a value that is not among the choices of a `Literal` field.

  Raises:
    InputError: the value is not; the message names the choices.
  """
  choices = choices_of(method).get(option)
  if choices is not None and value not in choices:
    raise InputError(
      f"{option} must be one of {', '.join(map(str, choices))}; {value!r} is "
      "not."
    )


@functools.cache
def choices_of(method: type) -> Mapping[str, tuple[Any, ...]]:
  """Returns the choices of each `Literal` field."""
  return {
    name: get_args(hint)
    for name, hint in _hints(method).items()
    if get_origin(hint) is Literal
  }


@functools.cache
def _hints(method: type) -> Mapping[str, Any]:
  try:
    return get_type_hints(method)
  except NameError:  # Of a name that only type checkers import.
    return {}
