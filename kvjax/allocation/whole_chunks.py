"""A budget in whole chunks of the prompt."""

import dataclasses

import numpy as np
from jaxtyping import Int

from kvjax.allocation.base import Allocation, Sizes, in_all_layers
from kvjax.options.budgets import Budget, Retention


@dataclasses.dataclass(frozen=True)
class WholeChunkCounts(Allocation):
  """Keeps a share of the chunks, the last of which may be shorter.

  A retention is a share of the number of chunks, by its own rounding. A budget
  in tokens is a limit. A row that is shorter than a chunk, or a limit below
  one, leaves tokens to keep one by one. If the short last chunk is kept, the
  row has fewer tokens than this counts.

  Source: kvpress's ChunkKVPress.

  Attributes:
    chunk: tokens per chunk.
  """

  chunk: int = dataclasses.field(metadata={"option": False})

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Tokens of the chunks that rows keep, the same for all layers."""
    kept = [self._kept(budget, int(n)) for n in lengths]
    return in_all_layers(kept, sizes)

  def _kept(self, budget: Budget, length: int) -> int:
    if length < self.chunk:
      return budget.num_kept(length)
    if isinstance(budget, Retention):
      chunks = budget.num_kept(-(-length // self.chunk))
      return min(chunks * self.chunk, length)
    limit = budget.num_kept(length)
    if limit == length or limit < self.chunk:
      return limit
    return limit // self.chunk * self.chunk
