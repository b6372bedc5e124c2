"""Batches of unequal prompts, padded to few shapes."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Int

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
  """

  tokens: Int[Array, "B S"] | Int[np.ndarray, "B S"]
  lengths: Int[Array, " B"] | Int[np.ndarray, " B"]

  def __post_init__(self) -> None:
    lengths, width = np.asarray(self.lengths), self.tokens.shape[1]
    if np.any(lengths < 1) or np.any(lengths > width):
      raise InputError(
        f"Lengths must be between 1 and the {width} tokens that rows are "
        f"padded to; they are {lengths.tolist()}."
      )

  @classmethod
  def of(
    cls, rows: Sequence[Sequence[int]], padded: int | None = None
  ) -> "Prompts":
    """Pads rows of token ids, by default to the bucket of the longest.

    Raises:
      InputError: there is no row, or one is empty.
    """
    if not rows:
      raise InputError("There are no prompts; give at least one.")
    for index, row in enumerate(rows):
      if not len(row):
        raise InputError(
          f"Prompt {index} has no tokens; every prompt needs at least one."
        )
    lengths = np.array([len(row) for row in rows], np.int32)
    width = max(padded or bucket(int(lengths.max())), int(lengths.max()))
    tokens = np.zeros((len(rows), width), np.int32)
    for filled, row in zip(tokens, rows, strict=True):
      filled[: len(row)] = row
    return cls(tokens, lengths)
