"""Batches of unequal prompts, padded to few shapes."""

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from kvjax.errors import InputError
from kvjax.struct import struct

_SMALLEST_BUCKET = 32


def bucket(length: int) -> int:
  """The padded length: the next of 32, 48, 64, 96, 128, 192, 256, ...

  Prompts of one bucket share a compiled program; padding is at most half.
  """
  size = _SMALLEST_BUCKET
  while size < length:
    size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
  return size


def bucket_lengths(padded: int) -> range:
  """Lengths that are padded to `padded`: no bucket is below two thirds."""
  return range(max(1, padded * 2 // 3), padded + 1)


@struct
class Prompts:
  """Token rows, padded on the right.

  Attributes:
    tokens: token ids; what stands after a row's end has no effect.
    lengths: real tokens of each row.
    protected: true for tokens that no method may evict, if there are any.
  """

  tokens: Int[Array, "B S"] | Int[np.ndarray, "B S"]
  lengths: Int[Array, " B"] | Int[np.ndarray, " B"]
  protected: Bool[np.ndarray, "B S"] | None = None

  def __post_init__(self) -> None:
    lengths, width = np.asarray(self.lengths), self.tokens.shape[1]
    if np.any(lengths < 1) or np.any(lengths > width):
      raise InputError(
        f"Lengths must be between 1 and the {width} tokens that rows are "
        f"padded to; they are {lengths.tolist()}."
      )

  @classmethod
  def of(
    cls,
    rows: Sequence[Sequence[int]],
    padded: int | None = None,
    protected: Sequence[Sequence[bool]] | None = None,
  ) -> "Prompts":
    """Pads rows of token ids, by default to the bucket of the longest.

    Args:
      rows: token ids.
      padded: the width, if the rows fit it.
      protected: for each token of each row, whether it must be kept: those of a
        system prompt, say, or of the last turn.

    Raises:
      InputError: there is no row, one is empty or a text, or `protected` has
        other lengths than the rows.
    """
    if not rows:
      raise InputError("There are no prompts; give at least one.")
    _check_rows(rows)
    for index, row in enumerate(rows):
      if not len(row):
        raise InputError(
          f"Prompt {index} has no tokens; every prompt needs at least one."
        )
    lengths = np.array([len(row) for row in rows], np.int32)
    width = max(padded or bucket(int(lengths.max())), int(lengths.max()))
    if protected is None:
      return cls(_padded(rows, width, np.int32), lengths)
    if [len(row) for row in protected] != lengths.tolist():
      raise InputError(
        "What is protected is said of every token: give as many values as each "
        f"row has tokens, {lengths.tolist()}."
      )
    mask = _padded(protected, width, np.bool_)
    return cls(_padded(rows, width, np.int32), lengths, mask)

  def rows(self) -> list[list[int]]:
    """The tokens as lists."""
    tokens, lengths = np.asarray(self.tokens), np.asarray(self.lengths)
    return [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]

  def repeated(self, times: int) -> "Prompts":
    """All rows so many times, one batch after another."""
    mask = self.protected
    return Prompts(
      np.tile(np.asarray(self.tokens), (times, 1)),
      np.tile(np.asarray(self.lengths), times),
      None if mask is None else np.tile(mask, (times, 1)),
    )

  def row(self, index: int) -> "Prompts":
    """One row alone, padded as before."""
    own = slice(index, index + 1)
    protected = None if self.protected is None else self.protected[own]
    return Prompts(self.tokens[own], self.lengths[own], protected)


def _check_rows(rows: Any) -> None:
  """Of `Any`, as it is those that check no types who need to be told."""
  for row in rows:
    if isinstance(row, str) or not hasattr(row, "__len__"):
      raise InputError(
        "Prompts are rows of token ids, as in [[5, 7], [9]]; "
        f"{reprlib.repr(row)} is no row."
      )


def _padded(
  rows: Sequence[Sequence[int]], width: int, dtype: type
) -> Shaped[np.ndarray, "B S"]:
  filled: np.ndarray = np.zeros((len(rows), width), dtype)
  for into, row in zip(filled, rows, strict=True):
    into[: len(row)] = row
  return filled
