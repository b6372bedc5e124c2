"""Reads a user's text as sentences for prose haystacks."""

import os
import pathlib

from kvjax.errors import InputError
from kvjax.experiments.tasks import prose
from kvjax.models.json_files import read_json, read_text

# The minimum number of sentences for a choice of needle positions.
_LEAST_SENTENCES = 40


def read(path: pathlib.Path) -> tuple[str, ...]:
  """Reads the sentences of a text, with whitespace collapsed.

  Args:
    path: a text file, RULER's `PaulGrahamEssays.json` with the text under
      "text", or a folder whose `.txt` files are read in the order of their
      names.

  Raises:
    InputError: the text cannot be read, or has fewer than 40 sentences.
  """
  sentences = prose.split_sentences(" ".join(_text(path).split()))
  if len(sentences) < _LEAST_SENTENCES:
    raise InputError(
      f"{path} is too short for an essay: it needs {_LEAST_SENTENCES} "
      "sentences that end in a full stop before a capital letter, and has "
      f"{len(sentences)}."
    )
  return tuple(sentences)


def _text(path: pathlib.Path) -> str:
  if os.path.isdir(path):
    files = sorted(path.glob("*.txt"))
    if not files:
      raise InputError(f"The folder {path} holds no .txt file.")
    return "\n".join(map(read_text, files))
  if path.suffix != ".json":
    return read_text(path)
  text = read_json(path).get("text")
  if not isinstance(text, str):
    raise InputError(f'{path} must hold the essays as a text under "text".')
  return text
