"""AdaKV: heads with much to remember keep more, the others less."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation, Chooser, LayerBudget, Sizes
from kvjax.cache.layers import LayerCache
from kvjax.kernels.select import among_largest, kth_largest
from kvjax.options.bounds import check_share
from kvjax.options.budgets import Budget
from kvjax.selection import exact_share, head_counts, top_slots


@dataclasses.dataclass(frozen=True)
class Adaptive(Allocation):
  """Spreads the budget of a layer over its KV heads.

  With W slots protected by the method and a budget of B per head, n_j is what
  head j has among the g (B - W) best slots of all g heads of a layer. It keeps
  its window and its best (1 - alpha) n_j + alpha (B - W) slots. These are
  rounded down, and what that leaves over goes, a slot each, to the heads of the
  largest remainder; where remainders are equal, to the one whose next slot has
  the higher score, then to the lower head. So a layer keeps exactly g B, and
  each head its share rounded down or up.

  A method that ranks more than single slots (ProtoKV's clusters, ChunkKV's
  chunks) shares out by the votes of SnapKV with its window (`Method.votes`),
  and then chooses within each head's share.

  Source: Feng et al., arXiv 2407.11550, Algorithm 1, with the safeguard of the
  authors' code.

  Attributes:
    over: what each layer keeps per head on average.
    alpha: share of the budget that is spread evenly, to three decimals; with 1
      all heads keep the same.
    normalize: scale a head's scores, where heads are compared, by the share of
      their sum that its own B - W best have; for scores that are not negative.
  """

  over: Allocation
  alpha: float = 0.2
  normalize: bool = False

  def __post_init__(self) -> None:
    check_share(self, "alpha")

  @property
  def ragged(self) -> bool:
    """Heads keep different numbers."""
    return True

  @property
  def votes(self) -> bool:
    """Heads compete."""
    return True

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """B: what the heads of a layer keep on average."""
    return self.over.counts(budget, lengths, sizes)

  def capacities(
    self, budget: Budget, padded: int, sizes: Sizes
  ) -> Int[np.ndarray, " L"]:
    """Most that the heads of a row of the bucket keep on average."""
    return self.over.capacities(budget, padded, sizes)

  def evaluate(
    self,
    method: Chooser,
    layer: Int[Array, ""],
    cache: LayerCache,
    activations: Activations,
  ) -> tuple[Float[Array, "B K T"], PyTree[Array]]:
    """The scores that heads compete with, and what the method finds."""
    votes = method.votes
    assert votes is not None
    scores = votes.evaluate(layer, cache, activations)
    if votes is method:
      return scores, None
    return scores, method.evaluate(layer, cache, activations)

  def select(
    self,
    method: Chooser,
    scores: tuple[Float[Array, "B K T"], PyTree[Array]],
    cache: LayerCache,
    budget: LayerBudget,
  ) -> Int[Array, "B K M"]:
    """What the method chooses of each head, as much as it is due.

    The heads of a row have `budget.counts` slots on average; M is the most
    that one of them can have.
    """
    votes = method.votes
    assert votes is not None
    competing, found = scores
    valid = cache.valid
    must_keep = budget.must_keep(cache)
    protected = votes.protected(cache, budget.per_head) & valid
    protected |= must_keep
    mean = budget.per_head
    always = jnp.minimum(_count(protected), mean)
    counts = always + self._shares(
      competing, valid & ~protected, jnp.minimum(_count(valid), mean) - always
    )
    _, kv_heads, slots = valid.shape
    most = min(self._most(kv_heads, budget.capacity), slots)
    if votes is method:
      return top_slots(competing, valid, protected, counts, most, must_keep)
    own = dataclasses.replace(budget, counts=counts, capacity=most)
    return method.select(found, cache, own)

  def _most(self, kv_heads: int, capacity: int) -> int:
    """Most slots of a head: all winners are its own."""
    alpha = exact_share(self.alpha)
    return math.ceil(capacity * (alpha + (1 - alpha) * kv_heads))

  def _shares(
    self,
    scores: Float[Array, "B K T"],
    candidates: Bool[Array, "B K T"],
    even: Int[Array, "B K"],
  ) -> Int[Array, "B K"]:
    """Slots of each head beside its protected ones.

    Args:
      scores: of the inner method.
      candidates: slots that compete.
      even: B - W, what each head would have by itself.
    """
    if self.normalize:
      scores = scores * _mass_of_best(scores, candidates, even)[..., None]
    wanted = head_counts(scores, candidates, jnp.sum(even, axis=1))
    # Integers: equal remainders must be equal.
    alpha = exact_share(self.alpha)
    steps, rest = jnp.divmod(even - wanted, alpha.denominator)
    whole, rest = jnp.divmod(rest * alpha.numerator, alpha.denominator)
    shares = wanted + steps * alpha.numerator + whole
    left = jnp.sum(even - shares, axis=1, keepdims=True)
    following = _best_after(scores, candidates, shares)
    order = jnp.lexsort((-following, -rest))
    return shares + (jnp.argsort(order, axis=-1) < left).astype(jnp.int32)


def _count(slots: Bool[Array, "B K T"]) -> Int[Array, "B K"]:
  return jnp.sum(slots.astype(jnp.int32), axis=-1)


def _best_after(
  scores: Float[Array, "B K T"],
  candidates: Bool[Array, "B K T"],
  counts: Int[Array, "B K"],
) -> Float[Array, "B K"]:
  """Each head's highest score after its `counts` best; -inf for none."""
  known = candidates & jnp.isfinite(scores)
  next_best = kth_largest(jnp.where(known, scores, -jnp.inf), counts + 1)
  return jnp.where(counts < _count(known), next_best, -jnp.inf)


def _mass_of_best(
  scores: Float[Array, "B K T"],
  candidates: Bool[Array, "B K T"],
  counts: Int[Array, "B K"],
) -> Float[Array, "B K"]:
  """Share of the sum of a head's scores that its `counts` best have."""
  known = candidates & jnp.isfinite(scores)
  among = among_largest(jnp.where(known, scores, -jnp.inf), counts)
  total = jnp.sum(scores, axis=-1, where=known)
  best = jnp.sum(scores, axis=-1, where=among)
  return jnp.where(total > 0, best / jnp.where(total > 0, total, 1.0), 1.0)
