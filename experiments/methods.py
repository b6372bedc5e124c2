"""Lists the methods that --methods takes.

  kvjax methods
  kvjax methods snapkv

prints every method with its presets, and the names that are put before a
method's name. Methods of installed packages and of --plugins are among them.
With names of methods or presets, it prints what each keeps, its options with
their values, and its presets. It takes less than ten seconds.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from kvjax.experiments import cli
from kvjax.experiments.inputs import plugin_inputs
from kvjax.registry.naming import options_of, unknown
from kvjax.registry.registry import METHODS, RETRIEVALS, Entry, Recipe
from kvjax.registry.wrappers import WRAPPERS

flags.adopt_module_key_flags(plugin_inputs)

# Columns of a terminal, and those of the names.
_WIDTH, _NAMES = 80, 22


def main(names: Sequence[str]) -> None:
  """Prints the list, or what is to be known of some methods."""
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
  return "\n\n".join(
    "\n".join([f"{title}:", *(_entry(*line) for line in lines)])
    for title, lines in groups.items()
  )


def page(name: str) -> str:
  """Describes a method or a preset, with its options and their values.

  Raises:
    InputError: there is none of this name.
  """
  made = METHODS.find(name)
  kind = RETRIEVALS if made is None else METHODS
  made = kind.find(name) if made is None else made
  if made is None:
    known = [*METHODS, *METHODS.presets, *RETRIEVALS, *RETRIEVALS.presets]
    raise unknown(name, known, [*METHODS, *RETRIEVALS])
  base = name.partition(".")[0]
  entry = kind[base]
  options = options_of(made).items()
  presets = ", ".join(f"{base}.{preset}" for preset in entry.presets)
  parts = [
    _entry(name, _about(entry)),
    _entry("", _doc(made)),
    *(_entry(f"  {option}", _value(given)) for option, given in options),
    _entry("", f"Presets: {presets}" if presets else ""),
  ]
  return "\n".join(filter(str.strip, parts))


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
