"""A budget of its own for every chunk of the prompt."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int

from kvjax.allocation.base import Allocation, Sizes, in_all_layers
from kvjax.errors import InputError
from kvjax.options.budgets import Budget, Retention


@dataclasses.dataclass(frozen=True)
class PerChunk(Allocation):
  """Keeps a share of each chunk, the last of which may be shorter.

  A retention is a share of each chunk, by its own rounding. A budget in tokens
  is shared in proportion to the lengths of the chunks.

  Source: kvpress's ChunkPress.

  Attributes:
    length: tokens per chunk.
    ends: number of last tokens of a row that a whole chunk must have room for.
  """

  prescribes = True

  length: int = dataclasses.field(metadata={"option": False})
  ends: int = dataclasses.field(default=0, metadata={"option": False})

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """The sum over the chunks, the same for all layers."""
    if isinstance(budget, Retention):
      whole, rest = np.divmod(lengths, self.length)
      kept = whole * budget.num_kept(self.length)
      kept += [budget.num_kept(int(n)) if n else 0 for n in rest]
    else:
      kept = np.array([budget.num_kept(int(n)) for n in lengths])
    return in_all_layers(kept, sizes)

  def parts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], padded: int
  ) -> Int[np.ndarray, "n C"]:
    """Number of tokens that rows keep of each chunk.

    Raises:
      InputError: a whole chunk of a row keeps fewer than `ends` tokens.
    """
    self._check_ends(budget, lengths)
    ends = np.arange(self.length, padded + self.length, self.length)
    ends = np.minimum(ends, np.asarray(lengths)[:, None])
    if not isinstance(budget, Retention):
      # Python's integers do not overflow.
      kept_before = [
        [budget.num_kept(int(n)) * int(end) // int(n) for end in row]
        for n, row in zip(lengths, ends, strict=True)
      ]
      # Differences of rounded sums: the chunks add up to exactly the budget.
      return np.diff(np.array(kept_before, np.int32), axis=1, prepend=0)
    spans = np.diff(ends, axis=1, prepend=0)
    kept = [
      [budget.num_kept(int(size)) if size else 0 for size in row]
      for row in spans
    ]
    return np.array(kept, np.int32)

  def check_protected(
    self,
    protected: Bool[np.ndarray, " n"],
    budget: Budget,
    sizes: Sizes,
    *,
    repeated: bool = False,
  ) -> None:
    """Refuses a chunk that protects more tokens than it keeps.

    Raises:
      InputError: they are too many.
    """
    del sizes, repeated
    length = len(protected)
    kept = self.parts(budget, np.array([length]), length)[0]
    for chunk, most in enumerate(kept):
      start = chunk * self.length
      count = protected[start : start + self.length].sum()
      if count > most:
        raise InputError(
          f"{count} tokens of a chunk of {self.length} are protected and "
          f"{most} of it are kept; protect fewer or give a larger budget."
        )

  def _check_ends(self, budget: Budget, lengths: Int[np.ndarray, " n"]) -> None:
    for length in lengths[lengths > self.length]:
      kept = budget.num_kept(self.length)
      if not isinstance(budget, Retention):
        kept = budget.num_kept(int(length)) * self.length // int(length)
      if kept < self.ends:
        raise InputError(
          f"Of {self.length} tokens per chunk, {kept} are kept, and the last "
          f"{self.ends} of the prompt need room in one; give longer chunks or "
          "a larger budget."
        )
