"""Parsing of names: a method or a preset, then options after colons."""

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.errors import InputError
from kvjax.options.bounds import check_choice
from kvjax.registry.registry import Names


def make_named[Made](name: str, names: Names[Made]) -> Made:
  """Makes what a name such as `keydiff:anchor=median_unit` stands for.

  Args:
    name: a method or a preset, followed by options, each after a colon. The
      values of a list are joined by plus signs: `skip_layers=0+1`;
      `skip_layers=` is the empty list.
    names: the known names.

  Raises:
    InputError: no such method, preset or option, or a value out of range.
  """
  base, *options = split_options(name)
  made = names.find(base)
  if made is None:
    raise unknown(base, [*names, *names.presets])
  return with_options(base, made, options)


def split_options(text: str) -> list[str]:
  """Splits a name and its options at their colons, but for addresses.

  Examples:
    >>> from kvjax.registry.parsing import split_options
    >>> split_options("kvzap:gate=gs://bucket/gate:level=head")
    ['kvzap', 'gate=gs://bucket/gate', 'level=head']
  """
  return re.split(r":(?!//)", text)


def unknown(base: str, known: Iterable[str]) -> InputError:
  """Makes the error of a name that stands for no method.

  Args:
    base: the name.
    known: names that may have been meant.
  """
  if base.endswith(".py"):
    return InputError(
      f"A method has a name, and {base} is a file; give the file to --plugins, "
      "or import it in Python, and give the name that it registers."
    )
  return InputError(
    f"There is no method {base!r}{suggest(base, known)}; kvjax methods lists "
    "all, and a file of your own adds one when it is imported, or given to "
    "--plugins."
  )


def with_options[Made](
  base: str, made: Made, options: Iterable[str], nested: bool = True
) -> Made:
  """Changes options of a method, or of a recipe of several parts.

  Args:
    base: its name, for messages.
    made: the method or the recipe.
    options: options of the form `name=value`.
    nested: whether they may be options of its parts, too.

  Raises:
    InputError: no such option, one that is given twice, or a value out of
      range.
  """
  given: set[str] = set()
  # Of one part at once: an option may fit only with the next one.
  changes: dict[_Path, dict[str, Any]] = {}
  for text in options:
    name, equals, value = text.partition("=")
    path = _find(made, name, nested)
    if path is None:
      known = _all_options(made, nested)
      raise InputError(
        f"Method {base!r} has no option {name!r}{suggest(name, known)}; it has "
        f"{', '.join(known) or 'none'}."
      )
    if not equals:
      raise InputError(f"Option {name!r} of {base!r} needs a value: {name}=...")
    if name in given:
      raise InputError(f"Option {name!r} of {base!r} is given twice.")
    given.add(name)
    values = changes.setdefault(path, {})
    values[name] = _value(base, name, value, _at(made, path))
  for path, values in changes.items():
    made = _change(made, path, values)
  return made


# Names of the nested fields that lead to a part.
_Path = tuple[str, ...]


def _parts(
  made: Any, nested: bool, path: _Path = ()
) -> Iterable[tuple[_Path, Any]]:
  """Parts with options: the method, what wraps it, and its allocation."""
  # Inner parts come first, so that an option is the method's if it has it.
  for field in dataclasses.fields(made) if nested else ():
    value = getattr(made, field.name)
    if dataclasses.is_dataclass(value):
      yield from _parts(value, nested, (*path, field.name))
  yield path, made


def _option_names(part: Any) -> list[str]:
  return [
    field.name
    for field in dataclasses.fields(part)
    if field.metadata.get("option", True)
    and not dataclasses.is_dataclass(getattr(part, field.name))
    # A value is parsed as the type of the present one; None has none to tell.
    and getattr(part, field.name) is not None
  ]


def owners_of(made: Any) -> dict[str, Any]:
  """Returns the options of a method or a recipe, and the part that has each."""
  parts = [part for _, part in _parts(made, nested=True)]
  # Of options of the same name, a name sets that of the first part.
  return {
    name: part for part in reversed(parts) for name in _option_names(part)
  }


def options_of(made: Any) -> dict[str, Any]:
  """Returns the options of a method or a recipe, and their present values."""
  return {name: getattr(part, name) for name, part in owners_of(made).items()}


def _all_options(made: Any, nested: bool) -> list[str]:
  parts = [part for _, part in _parts(made, nested)]
  return list(dict.fromkeys(n for part in parts for n in _option_names(part)))


def _find(made: Any, name: str, nested: bool) -> _Path | None:
  """Path of the first part that has the option."""
  parts = _parts(made, nested)
  return next((at for at, part in parts if name in _option_names(part)), None)


def _at(made: Any, path: _Path) -> Any:
  return functools.reduce(getattr, path, made)


def _change(made: Any, path: _Path, values: Mapping[str, Any]) -> Any:
  """Changes options of the part at a path."""
  if not path:
    return dataclasses.replace(made, **values)
  first, *rest = path
  part = _change(getattr(made, first), tuple(rest), values)
  return dataclasses.replace(made, **{first: part})


def _value(base: str, name: str, value: str, part: Any) -> Any:
  """Parses an option as the type of its current value."""
  read = _parsed(base, name, value, getattr(part, name))
  check_choice(type(part), name, read)
  return read


def _parsed(base: str, name: str, value: str, present: Any) -> Any:
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
  """Parses a number that fits an int32 or float32 array."""
  number = kind(text)
  if not abs(number) < 2**31:  # also refuses infinity and NaN
    raise ValueError
  return number


def suggest(word: str, known: Iterable[str]) -> str:
  """Suggests similar words, in parentheses; empty if there are none."""
  close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
  return f" (did you mean {' or '.join(close)}?)" if close else ""
