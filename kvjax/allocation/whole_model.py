"""KVzip's allocation: all heads of a model share one budget."""

import dataclasses

import numpy as np
from jaxtyping import Int

from kvjax.allocation.base import Allocation, Sizes, in_all_layers
from kvjax.allocation.whole_layer import kept_together
from kvjax.options.budgets import Budget


@dataclasses.dataclass(frozen=True)
class WholeModel(Allocation):
  """Spreads a budget over the heads of all layers by their scores.

  The best slots of all heads of all layers are kept, protected ones first. No
  head has a minimum. Scores must be comparable between layers.

  Source: Kim et al., arXiv 2505.23416, Section 3.3 (non-uniform budgets).
  """

  ragged = True
  spreads_layers = True
  # Nothing is selected before all layers are scored.
  whole_model = True

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Mean number of tokens of all heads, rounded up."""
    # A model whose layers all have windows has no head that competes.
    heads = max(sum(sizes.heads), 1)
    mean = -(-kept_together(budget, lengths, sum(sizes.heads)) // heads)
    return in_all_layers(mean, sizes)

  def totals(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """An even share of each layer; they add up to what the model keeps."""
    ends = np.cumsum(sizes.heads, dtype=np.int64)[:, None]
    heads = max(sum(sizes.heads), 1)
    shares = kept_together(budget, lengths, sum(sizes.heads)) * ends // heads
    return np.diff(shares, axis=0, prepend=0).astype(np.int32)
