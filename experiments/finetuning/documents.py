"""Reads documents as chunks of tokens and batches of them."""

import hashlib
import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.longbench import finder
from kvjax.files import read_text
from kvjax.models.tokenizer import Tokenizer
from kvjax.prompts import Prompts

SUFFIXES = (".txt", ".md")


class Batch(NamedTuple):
  """Chunks of a step; rows of length 0 pad the last batch of an epoch."""

  tokens: Int[np.ndarray, "B S"]
  lengths: Int[np.ndarray, " B"]


def read(folder: pathlib.Path) -> list[str]:
  """Reads the texts of a folder and its subfolders, sorted by path.

  Raises:
    InputError: the folder does not exist or has no text, or a file is not
      UTF-8.
  """
  kinds = " and ".join(SUFFIXES)
  if not os.path.isdir(folder):
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


def read_longbench(
  path: pathlib.Path, names: Sequence[str], count: int | None = None
) -> list[str]:
  """Reads the contexts of datasets of LongBench.

  Args:
    path: a file or folder; see `finder.find`.
    names: datasets; those that are missing are left out.
    count: contexts per dataset, if not all.

  Raises:
    InputError: no dataset is there, or a file is malformed.
  """
  files = finder.find(path, names)
  rows = (
    itertools.islice(
      itertools.chain.from_iterable(file.rows() for file in of_set), count
    )
    for of_set in files.values()
  )
  return [row.text("context") for of_set in rows for row in of_set]


def chunks(
  texts: Sequence[str], tokenizer: Tokenizer, length: int, multiple: int
) -> Prompts:
  """Splits each text into chunks of about equal length.

  A chunk starts with BOS if the tokenizer has one, like prompts.

  Args:
    texts: the documents.
    tokenizer: the model's tokenizer.
    length: maximum tokens of a chunk, including BOS; 2 or more.
    multiple: rows are padded to a multiple of this many tokens.

  Raises:
    InputError: there is no token to predict, or the model does not embed BOS.
  """
  first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  tokenizer.encode(tokenizer.bos)  # refuses one that the model does not embed
  limit = length - len(first)
  rows = []
  for text in texts:
    tokens = np.asarray(tokenizer.encode(text), np.int32)
    for part in np.array_split(tokens, max(1, -(-len(tokens) // limit))):
      rows.append([*first, *part.tolist()])
  # The first token of a row is not predicted.
  rows = [row for row in rows if len(row) > 1]
  if not rows:
    raise InputError("The documents are too short: none has two tokens.")
  longest = max(map(len, rows))
  return Prompts.of(rows, -(-longest // multiple) * multiple)


def steps_per_epoch(parts: Prompts, size: int) -> int:
  """Counts the batches of `size` rows in an epoch."""
  return -(-len(parts.lengths) // size)


def batch(parts: Prompts, size: int, step: int, seed: int) -> Batch:
  """Returns the batch of a step; each epoch has its own order."""
  epoch, number = divmod(step, steps_per_epoch(parts, size))
  order = np.random.default_rng((seed, epoch)).permutation(len(parts.lengths))
  chosen = order[number * size : (number + 1) * size]
  empty = size - len(chosen)
  return Batch(
    np.pad(parts.tokens[chosen], ((0, empty), (0, 0))),
    np.pad(parts.lengths[chosen], (0, empty)),
  )


def digest(parts: Prompts) -> str:
  """Hashes the chunks, to identify them."""
  hashed = hashlib.sha256(np.asarray(parts.lengths).tobytes())
  hashed.update(np.asarray(parts.tokens).tobytes())
  return hashed.hexdigest()[:12]
