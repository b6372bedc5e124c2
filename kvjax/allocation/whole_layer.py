"""The heads of a layer share a budget by their scores, without a minimum."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.allocation.base import Allocation, Chooser, LayerBudget, Sizes
from kvjax.cache.layers import LayerCache
from kvjax.options.budgets import Budget, Retention
from kvjax.selection import head_counts, top_slots


@dataclasses.dataclass(frozen=True)
class WholeLayer(Allocation):
  """Spreads the budget of a layer over its heads by their scores.

  The best slots of all heads are kept, protected ones first. No head has a
  minimum.

  Source: kvpress's KVzipPress with `layerwise=True`, after Kim et al., arXiv
  2505.23416.
  """

  ragged = True
  votes = True
  ranks_slots = True

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Mean number of tokens of the heads of a layer, rounded up."""
    heads = np.array(sizes.heads, np.int32)[:, None]
    means = -(-self.totals(budget, lengths, sizes) // heads)
    # By kvpress's rounding, layers with other numbers of heads differ by one.
    most = means.max(axis=0, keepdims=True, initial=0)
    return np.broadcast_to(most, means.shape)

  def totals(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Number of tokens that all heads of a layer keep together."""
    totals = [kept_together(budget, lengths, heads) for heads in sizes.heads]
    return np.array(totals, np.int32).reshape(sizes.layers, len(lengths))

  def select(
    self,
    method: Chooser,
    scores: Float[Array, "B K T"],
    cache: LayerCache,
    budget: LayerBudget,
  ) -> Int[Array, "B K M"]:
    """Selects the best slots of all heads."""
    valid, must_keep = cache.valid, budget.must_keep(cache)
    votes, total = method.votes, budget.total
    assert votes is not None
    assert total is not None
    protected = votes.protected(cache, budget.per_head)
    counts = count_best(scores, valid, protected | must_keep, total)
    _, kv_heads, slots = valid.shape
    # One head may have all of them.
    capacity = min(kv_heads * budget.capacity, slots)
    return top_slots(scores, valid, protected, counts, capacity, must_keep)


def kept_together(
  budget: Budget, lengths: Int[np.ndarray, " n"], heads: int
) -> Int[np.ndarray, " n"]:
  """Number of tokens that so many heads of rows of these lengths keep."""
  if isinstance(budget, Retention) and budget.rounding == "kvpress":
    # kvpress counts the tokens that it removes.
    removed = [int(heads * int(n) * (1 - budget.share)) for n in lengths]
    return np.asarray(heads * lengths - np.array(removed), np.int64)
  kept = [heads * budget.num_kept(int(n)) for n in lengths]
  return np.array(kept, np.int64)


def count_best(
  scores: Float[Array, "B H T"],
  valid: Bool[Array, "B H T"],
  protected: Bool[Array, "B H T"],
  totals: Int[Array, " B"],
) -> Int[Array, "B H"]:
  """Number of slots that each of H heads keeps of the best of them all.

  Args:
    scores: scores of the slots.
    valid: slots that have a token.
    protected: slots that are kept before all others.
    totals: tokens that a row keeps of all heads.
  """
  protected = protected & valid
  kept = jnp.sum(protected, axis=-1, dtype=jnp.int32)
  # Protected slots alone may be too many for the budget. What is left of equal
  # shares goes to the first heads that have more of them.
  least, rest = (x[:, None] for x in jnp.divmod(totals, scores.shape[1]))
  more = kept > least
  more &= jnp.cumsum(more, axis=1, dtype=jnp.int32) <= rest
  kept = jnp.minimum(kept, least) + more.astype(jnp.int32)
  free = totals - jnp.sum(kept, axis=-1, dtype=jnp.int32)
  return kept + head_counts(scores, valid & ~protected, free)
