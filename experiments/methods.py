"""Lists the methods that --methods takes.

  kvjax methods
  kvjax methods snapkv ada/keydiff:alpha=0.5

prints every method with its presets, and the names that are put before a
method's name. Methods of installed packages and of --plugins are among them.
With names as --methods takes them, or those before a method's name, it prints
what each keeps, its options with their values and meanings, and its presets.
It takes less than ten seconds.
"""

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.inputs import plugin_inputs
from kvjax.options.bounds import choices_of
from kvjax.registry.names import get_recipe, get_retrieval, split_prefixes
from kvjax.registry.parsing import owners_of, unknown
from kvjax.registry.registry import (
  METHODS,
  RETRIEVALS,
  Entry,
  Recipe,
  load_plugins,
)
from kvjax.registry.wrappers import WRAPPERS

flags.adopt_module_key_flags(plugin_inputs)

# Columns of a terminal, and those of the names.
_WIDTH, _NAMES = 80, 22
_LEGEND = (
  "Each line: a name, the method, its paper, and presets of its options.\n"
  "kvjax methods NAME tells of one, with its options and what they mean."
)


def main(names: Sequence[str]) -> None:
  """Prints the list, or what is to be known of some methods."""
  load_plugins()
  pages = [page(name) for name in names]
  print("\n\n".join(pages) if pages else listing())


def listing() -> str:
  """Lists methods, retrieval methods and prefixes, with a line or two each."""
  prefixes = {f"{name}/": each.summary for name, each in WRAPPERS.items()}
  groups = {
    "Methods, which evict": _described(METHODS),
    "Retrieval methods, which keep everything and read some": _described(
      RETRIEVALS
    ),
    "Before a method's name, as in ada/snapkv": prefixes.items(),
  }
  tables = (
    "\n".join([f"{title}:", *(_entry(*line) for line in lines)])
    for title, lines in groups.items()
  )
  return "\n\n".join([_LEGEND, *tables])


def page(name: str) -> str:
  """Describes what a name stands for, with its options and their values.

  Args:
    name: as for `kvjax.get_plan`, or a prefix alone, such as "ada".

  Raises:
    InputError: it stands for nothing.
  """
  prefix, _, options = name.strip().removesuffix("/").partition(":")
  if prefix in WRAPPERS and not options:
    wrapper = WRAPPERS[prefix]
    lines = _options(_owners_of_prefix(wrapper.outer))
    return "\n".join([_entry(f"{prefix}/", wrapper.summary), *lines])
  if prefix in WRAPPERS and "/" not in options:
    raise InputError(
      f"{prefix} stands before a method, as in {name.strip('/ ')}/snapkv."
    )
  base = split_prefixes(name.strip())[1].partition(":")[0]
  kind = METHODS if METHODS.find(base) is not None else RETRIEVALS
  if kind.find(base) is None:
    known = [*METHODS, *METHODS.presets, *RETRIEVALS, *RETRIEVALS.presets]
    raise unknown(name, known)
  made = get_recipe(name) if kind is METHODS else get_retrieval(name)
  family = base.partition(".")[0]
  presets = ", ".join(f"{family}.{each}" for each in kind[family].presets)
  parts = [
    _entry(name, _about(kind[family])),
    _entry("", _doc(kind.find(base))),
    *_options(owners_of(made)),
    _entry("", f"Presets: {presets}" if presets else ""),
  ]
  return "\n".join(filter(str.strip, parts))


def _owners_of_prefix(outer: type) -> dict[str, type]:
  """By option of what a prefix makes, the class that has its default."""
  return {
    field.name: outer
    for field in dataclasses.fields(outer)
    if field.default is not dataclasses.MISSING
    and field.metadata.get("option", True)
    and field.name != "over"
  }


def _options(owners: Mapping[str, Any]) -> Iterator[str]:
  """Yields the value of each option, and what it means.

  Args:
    owners: by option, what has it: a part of a method, or a class with the
      defaults of all of them.
  """
  for name, owner in owners.items():
    made = owner if isinstance(owner, type) else type(owner)
    value = getattr(owner, name)
    others = [one for one in choices_of(made).get(name, ()) if one != value]
    choices = f" (or {', '.join(map(_value, others))})" if others else ""
    yield _entry(f"  {name}", f"{_value(value)}{choices}")
    yield _entry("", _meaning(made, name))


def _meaning(made: type, option: str) -> str:
  """What the docstring of a class, or of one that it extends, says of it."""
  for cls in made.__mro__:
    _, _, listed = (cls.__doc__ or "").partition("Attributes:\n")
    # What follows is indented like the option, or less.
    found = re.search(rf"^( +){option}: (.*\n(?:\1 +.*\n)*)", listed, re.M)
    if found:
      return " ".join(found[2].split())
  return ""


def _value(given: Any) -> str:
  """Formats the value of an option as a name takes it."""
  if isinstance(given, tuple):
    return "+".join(map(str, given))
  return str(given).lower() if isinstance(given, bool) else str(given)


def _doc(made: Any) -> str:
  """The first line of a method's docstring, if it has one of its own."""
  cls = type(made.method if isinstance(made, Recipe) else made)
  first = (cls.__doc__ or "").strip().partition("\n")[0]
  # Dataclasses without a docstring get their signature.
  return "" if first.startswith(f"{cls.__name__}(") else first


def _about(entry: Entry) -> str:
  """What an entry stands for, and its paper."""
  paper = f"arXiv {entry.paper}" if entry.paper else ""
  summary = entry.summary or _doc(entry.make())
  return "; ".join(filter(None, [summary, paper]))


def _described(entries: Mapping[str, Entry]) -> Iterator[tuple[str, str]]:
  """Yields names, and what they stand for."""
  for name, entry in entries.items():
    presets = ", ".join(f"{name}.{preset}" for preset in entry.presets)
    yield name, "; ".join(filter(None, [_about(entry), presets]))


def _entry(name: str, about: str) -> str:
  return textwrap.fill(
    f"  {name:{_NAMES - 3}} {about}",
    _WIDTH,
    subsequent_indent=" " * _NAMES,
    break_on_hyphens=False,
  )


if __name__ == "__main__":
  cli.run_on_arguments(main)
