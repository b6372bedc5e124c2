"""Word lists for RULER's common words and for the keys of its needles."""

import importlib.resources
import pathlib
from collections.abc import Iterable

from kvjax.errors import InputError
from kvjax.experiments.metrics.libraries import library
from kvjax.experiments.tasks.words import KeyWords
from kvjax.files import read_json, read_text

# The package whose lists RULER uses; its name replaces a file name.
PACKAGE = "wonderwords"

_NOUNS, _ADJECTIVES, _VERBS = (
  "nounlist.txt",
  "adjectivelist.txt",
  "verblist.txt",
)
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
    entries = [
      word for name in (_NOUNS, _ADJECTIVES, _VERBS) for word in _listed(name)
    ]
  elif source.endswith(".json"):
    entries = list(read_json(pathlib.Path(source)).values())
    if not all(isinstance(entry, str) for entry in entries):
      raise InputError(f"{source} must hold a JSON object of words only.")
  else:
    entries = read_text(pathlib.Path(source)).splitlines()
  distinct = _distinct(entries)
  if len(distinct) < _LEAST_WORDS:
    raise InputError(
      f"{source} is too short a list: it needs {_LEAST_WORDS} words, one per "
      f"line, and has {len(distinct)}."
    )
  return distinct


def key_words() -> KeyWords:
  """Reads the adjectives and nouns of the package.

  RULER (`niah.py`) draws its keys from all their pairs; it also has those of
  adjectives that end in a blank.

  Raises:
    InputError: the package is not installed.
  """
  return KeyWords(_distinct(_listed(_ADJECTIVES)), _distinct(_listed(_NOUNS)))


def _listed(name: str) -> list[str]:
  assets = importlib.resources.files(library(PACKAGE)) / "assets"
  return (assets / name).read_text("utf-8").splitlines()


def _distinct(entries: Iterable[str]) -> tuple[str, ...]:
  return tuple(sorted({word.strip() for word in entries} - {""}))
