"""KVzip's allocation: all heads of a model share one budget."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.allocation.base import Allocation, Sizes
from kvjax.options.budgets import Budget, Retention
from kvjax.selection import head_counts


@dataclasses.dataclass(frozen=True)
class WholeModel(Allocation):
  """Spreads a budget over the heads of all layers by their scores.

  The best slots of all heads of all layers are kept, protected ones first. No
  head has a minimum. Scores must be comparable between layers.

  Source: Kim et al., arXiv 2505.23416, Section 3.3 (non-uniform budgets).
  """

  @property
  def ragged(self) -> bool:
    """True: heads keep different numbers of tokens."""
    return True

  @property
  def spreads_layers(self) -> bool:
    """True: layers get different shares."""
    return True

  @property
  def whole_model(self) -> bool:
    """True: nothing is selected before all layers are scored."""
    return True

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Mean number of tokens of all heads, rounded up."""
    # A model whose layers all have windows has no head that competes.
    heads = max(sum(sizes.heads), 1)
    mean = -(-self._total(budget, lengths, sizes) // heads)
    return np.tile(mean.astype(np.int32), (sizes.layers, 1))

  def totals(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """An even share of each layer; they add up to what the model keeps."""
    ends = np.cumsum(sizes.heads, dtype=np.int64)[:, None]
    heads = max(sum(sizes.heads), 1)
    shares = self._total(budget, lengths, sizes) * ends // heads
    return np.diff(shares, axis=0, prepend=0).astype(np.int32)

  def _total(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, " n"]:
    """Number of tokens that all heads of all layers keep together."""
    heads = sum(sizes.heads)
    if isinstance(budget, Retention) and budget.rounding == "kvpress":
      # kvpress counts the tokens that it removes.
      removed = [int(heads * int(n) * (1 - budget.share)) for n in lengths]
      return np.asarray(heads * lengths - np.array(removed), np.int64)
    kept = [heads * budget.num_kept(int(n)) for n in lengths]
    return np.array(kept, np.int64)

  def head_counts(
    self,
    scores: Float[Array, "B H T"],
    valid: Bool[Array, "B H T"],
    protected: Bool[Array, "B H T"],
    totals: Int[Array, " B"],
  ) -> Int[Array, "B H"]:
    """Number of slots that each of the H heads of the model keeps.

    Args:
      scores: scores of the slots.
      valid: slots that have a token.
      protected: slots that are kept before all others.
      totals: tokens that a row keeps of all heads.
    """
    protected = protected & valid
    kept = jnp.sum(protected, axis=-1, dtype=jnp.int32)
    # Protected slots alone may be too many for the budget.
    kept = jnp.minimum(kept, (totals // scores.shape[1])[:, None])
    free = totals - jnp.sum(kept, axis=-1)
    return kept + head_counts(scores, valid & ~protected, free)
