"""Lists the methods that --methods takes.

  kvjax methods

prints every method with its presets, and the names that are put before a
method's name. Methods of installed packages are among them.
"""

import textwrap
from collections.abc import Iterator, Mapping

from kvjax.experiments import cli
from kvjax.registry.registry import METHODS, RETRIEVALS, Entry
from kvjax.registry.wrappers import WRAPPERS

# Columns of a terminal, and those of the names.
_WIDTH, _NAMES = 80, 22


def main() -> None:
  """Prints the list."""
  print(listing())


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


def _described(entries: Mapping[str, Entry]) -> Iterator[tuple[str, str]]:
  """Yields names, and what they stand for."""
  for name, entry in entries.items():
    parts = [entry.summary, f"arXiv {entry.paper}" if entry.paper else ""]
    presets = ", ".join(f"{name}.{preset}" for preset in entry.presets)
    about = "; ".join(filter(None, [*parts, presets]))
    yield name, about


def _entry(name: str, about: str) -> str:
  return textwrap.fill(
    f"  {name:{_NAMES - 3}} {about}",
    _WIDTH,
    subsequent_indent=" " * _NAMES,
    break_on_hyphens=False,
  )


if __name__ == "__main__":
  cli.run(main)
