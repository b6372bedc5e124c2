"""Word lists for RULER's common words."""

import importlib.resources
import pathlib

from kvjax.errors import InputError
from kvjax.experiments.metrics.libraries import library
from kvjax.models.json_files import read_json, read_text

# The package whose lists RULER uses; its name replaces a file name.
PACKAGE = "wonderwords"

_LISTS = ("nounlist.txt", "adjectivelist.txt", "verblist.txt")
# The words of the solved example of a prompt.
_LEAST_WORDS = 40


def read(source: str) -> tuple[str, ...]:
  """Reads distinct words, sorted.

  Args:
    source: "wonderwords" for the lists of that package, else a file with a
      word per line, or one with a JSON object whose values are words, such as
      RULER's `english_words.json`.

  Raises:
    InputError: the package is not installed, or the file cannot be read or has
      too few words.
  """
  if source == PACKAGE:
    assets = importlib.resources.files(library(PACKAGE)) / "assets"
    lines = [(assets / name).read_text("utf-8") for name in _LISTS]
    entries = "\n".join(lines).splitlines()
  elif source.endswith(".json"):
    entries = list(map(str, read_json(pathlib.Path(source)).values()))
  else:
    entries = read_text(pathlib.Path(source)).splitlines()
  distinct = {word.strip() for word in entries} - {""}
  if len(distinct) < _LEAST_WORDS:
    raise InputError(
      f"{source} is too short a list: it needs {_LEAST_WORDS} words, one per "
      f"line, and has {len(distinct)}."
    )
  return tuple(sorted(distinct))
