"""Flags for the prose around needles and the words of their keys."""

import functools
import pathlib

from absl import flags

from kvjax.errors import InputError
from kvjax.experiments.benchmarks import essays
from kvjax.experiments.benchmarks.ruler import generator, word_lists

NAMES = ("essay", "words")

ESSAY = flags.DEFINE_string(
  "essay",
  None,
  "Text, or folder of texts, to hide needles in; "
  f"{' or '.join(essays.NAMED)}, which is fetched once; or {essays.TRAINING}, "
  "chapters of Python's documentation that calibrate takes by default.",
)
WORDS = flags.DEFINE_string(
  "words",
  None,
  f"{word_lists.PACKAGE} for RULER's lists, in needles' keys and in cwe, or a "
  "file of words for RULER's cwe.",
)


@functools.cache
def texts() -> generator.Texts:
  """Reads the texts of needles that the flags name, once.

  Raises:
    InputError: --words names a file, or see `generator.Texts.read`.
  """
  if WORDS.value not in (None, word_lists.PACKAGE):
    raise InputError(
      f"--words={WORDS.value[:200]} is a list for RULER's cwe; needles' keys "
      f"are of --words={word_lists.PACKAGE} or, without it, of kvjax's words."
    )
  return generator.Texts.read(essay_path(), WORDS.value)


def essay_path() -> pathlib.Path | None:
  """Returns the file, folder or name that --essay gives."""
  return None if ESSAY.value is None else pathlib.Path(ESSAY.value)
