"""A retrieval method and how many keys it reads per token."""

import dataclasses

import numpy as np
from jaxtyping import Int

from kvjax.options.budgets import Budget
from kvjax.retrieval.base import Retrieval


@dataclasses.dataclass(frozen=True)
class SparseAttention:
  """Reads a few of the keys that a cache holds.

  Attributes:
    retrieval: finds them.
    budget: how many keys each KV head looks up per token, beside the resident
      ones; a retention is a share of the prompt.
  """

  retrieval: Retrieval
  budget: Budget

  @property
  def fixed(self) -> bool:
    """Whether the method itself says how much it looks up."""
    return self.retrieval.reads > 0

  def num_keys(self, lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """Keys that rows of these lengths look up per token."""
    count = self.retrieval.count
    return np.array([count(self.budget, int(n)) for n in lengths], np.int32)

  def max_keys(self, padded: int, lengths: Int[np.ndarray, " B"]) -> int:
    """Most that any row looks up; the same for most rows of a bucket."""
    most = self.retrieval.count(self.budget, padded)
    return max(most, int(self.num_keys(lengths).max()))
