"""Documents of a folder, as chunks of tokens and batches of them."""

import hashlib
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from kvjax.errors import InputError
from kvjax.models.json_files import read_text
from kvjax.models.tokenizer import Tokenizer
from kvjax.prompts import Prompts

SUFFIXES = (".txt", ".md")


class Batch(NamedTuple):
  """Chunks of a step; rows of length 0 fill the last batch of an epoch."""

  tokens: Int[np.ndarray, "B S"]
  lengths: Int[np.ndarray, " B"]


def read(folder: pathlib.Path) -> list[str]:
  """The texts of a folder and the folders in it, in the order of their paths.

  Raises:
    InputError: there is no such folder, it holds no text, or a file is not
      UTF-8.
  """
  kinds = " and ".join(SUFFIXES)
  if not folder.is_dir():
    raise InputError(f"{folder} is no folder; documents are its {kinds} files.")
  paths = sorted(
    path
    for path in folder.rglob("*")
    if path.suffix in SUFFIXES and path.is_file()
  )
  texts = [text for text in map(read_text, paths) if text.strip()]
  if not texts:
    raise InputError(f"{folder} holds no text in {kinds} files.")
  return texts


def chunks(
  texts: Sequence[str], tokenizer: Tokenizer, length: int, multiple: int
) -> Prompts:
  """Each text in parts of about the same length, none of them longer.

  A part begins with BOS, where the tokenizer has one, as prompts do.

  Args:
    texts: the documents.
    tokenizer: of the model.
    length: most tokens of a part, BOS included; 2 or more.
    multiple: rows are padded to a multiple of this many tokens.

  Raises:
    InputError: there is no token to foretell.
  """
  first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  room = length - len(first)
  rows = []
  for text in texts:
    tokens = np.asarray(tokenizer.encode(text), np.int32)
    for part in np.array_split(tokens, max(1, -(-len(tokens) // room))):
      rows.append([*first, *part.tolist()])
  # The first token of a row is not foretold.
  rows = [row for row in rows if len(row) > 1]
  if not rows:
    raise InputError("The documents are too short: none has two tokens.")
  longest = max(map(len, rows))
  return Prompts.of(rows, -(-longest // multiple) * multiple)


def steps_per_epoch(parts: Prompts, size: int) -> int:
  """Batches of `size` rows that hold every part once."""
  return -(-len(parts.lengths) // size)


def batch(parts: Prompts, size: int, step: int, seed: int) -> Batch:
  """The batch of a step; each epoch has an order of its own."""
  epoch, number = divmod(step, steps_per_epoch(parts, size))
  order = np.random.default_rng((seed, epoch)).permutation(len(parts.lengths))
  chosen = order[number * size : (number + 1) * size]
  empty = size - len(chosen)
  return Batch(
    np.pad(parts.tokens[chosen], ((0, empty), (0, 0))),
    np.pad(parts.lengths[chosen], (0, empty)),
  )


def digest(parts: Prompts) -> str:
  """Tells sets of parts apart."""
  hashed = hashlib.sha256(np.asarray(parts.lengths).tobytes())
  hashed.update(np.asarray(parts.tokens).tobytes())
  return hashed.hexdigest()[:12]
