"""AdaKV: the heads of a layer share its budget by their scores."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation, Chooser, LayerBudget, Sizes
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.kernels.select import among_largest, kth_largest
from kvjax.options.bounds import check_share
from kvjax.options.budgets import Budget
from kvjax.selection import exact_share, head_counts, top_slots


@dataclasses.dataclass(frozen=True)
class Adaptive(Allocation):
  """Spreads the budget of a layer over its KV heads.

  The method protects W slots per head, and B is the budget per head. n_j is the
  number of slots of head j among the g (B - W) best slots of all g heads of a
  layer. Head j keeps its window and its best (1 - alpha) n_j + alpha (B - W)
  slots. Shares are rounded down, and the remaining slots go to the heads with
  the largest remainders, one slot each. Ties prefer the head whose next slot
  has the higher score, then the lower head. A layer keeps exactly g B tokens,
  and each head its share rounded down or up.

  For a method that does not rank single slots (ProtoKV's clusters, ChunkKV's
  chunks), heads compete by the votes of SnapKV with its window
  (`Method.votes`). The method then selects within each head's share.

  Source: Feng et al., arXiv 2407.11550, Algorithm 1, with the mixture of the
  authors' code. That rounds alpha (B - W) down and each head's sum to nearest,
  so that a layer may keep a few tokens more or fewer than g B. For the floor of
  kvpress, see `Floored`.

  Attributes:
    over: allocation that gives the mean over the heads of each layer.
    alpha: share of the budget that is spread evenly, to three decimals; with 1,
      all heads keep the same number of tokens.
    normalize: before comparing heads, scale each head's scores by the share of
      their sum in its B - W best; for non-negative scores.
  """

  ragged = True
  votes = True

  over: Allocation
  alpha: float = 0.2
  normalize: bool = False

  def __post_init__(self) -> None:
    check_share(self, "alpha")
    if self.over.ragged:
      raise InputError(
        f"{type(self.over).__name__} gives heads unequal shares already; give "
        f"{type(self).__name__} one whose heads keep equally many tokens."
      )

  @property
  def spreads_layers(self) -> bool:
    """Whether the inner allocation spreads budgets over layers."""
    return self.over.spreads_layers

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """B, the mean number of tokens of the heads of a layer."""
    return self.over.counts(budget, lengths, sizes)

  def capacities(
    self, budget: Budget, padded: int, sizes: Sizes
  ) -> Int[np.ndarray, " L"]:
    """Maximum of B over the rows of a bucket."""
    return self.over.capacities(budget, padded, sizes)

  def evaluate(
    self,
    method: Chooser,
    layer: Int[Array, ""],
    cache: LayerCache,
    activations: Activations,
  ) -> tuple[Float[Array, "B K T"], PyTree[Array]]:
    """Computes the scores that heads compete by, and those of the method."""
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
    """Selects the slots of each head within its share.

    The mean share of the heads of a row is `budget.counts`, and M is the
    maximum share that one head can have.
    """
    votes = method.votes
    assert votes is not None
    competing, method_scores = scores
    valid = cache.valid
    must_keep = budget.must_keep(cache)
    protected = votes.protected(cache, budget.per_head) & valid
    protected |= must_keep
    mean = budget.per_head
    # At most B: of more protected slots, `top_slots` keeps the newest.
    num_protected = jnp.minimum(_count(protected), mean)
    counts = num_protected + self._shares(
      competing,
      valid & ~protected,
      jnp.minimum(_count(valid), mean) - num_protected,
      num_protected,
    )
    _, kv_heads, slots = valid.shape
    capacity = min(self._most(kv_heads, budget.capacity), slots)
    if votes is method:
      return top_slots(competing, valid, protected, counts, capacity, must_keep)
    # Its own scores choose the slots; the votes have set the counts only.
    method_budget = dataclasses.replace(
      budget, counts=counts, capacity=capacity, safe=self._safe(mean)
    )
    return method.select(method_scores, cache, method_budget)

  def token_scores(
    self,
    method: Chooser,
    scores: tuple[Float[Array, "B K T"], PyTree[Array]],
    cache: LayerCache,
  ) -> Float[Array, "B K T"]:
    """Returns the scores that the heads compete by."""
    del method, cache
    return scores[0]

  def _most(self, kv_heads: int, capacity: int) -> int:
    """Maximum slots of a head, which it has if it wins all slots."""
    alpha = exact_share(self.alpha)
    # A float product may round to above a whole number; a fraction does not.
    return math.ceil(capacity * (alpha + (1 - alpha) * kv_heads))

  def _safe(self, mean: Int[Array, " B #K"]) -> Int[Array, " B #K"] | None:
    """Slots that the best votes of each head have for sure, if any."""
    del mean
    return None

  def _shares(
    self,
    scores: Float[Array, "B K T"],
    candidates: Bool[Array, "B K T"],
    even: Int[Array, "B K"],
    protected: Int[Array, "B K"],
  ) -> Int[Array, "B K"]:
    """Number of slots of each head besides its protected ones.

    Args:
      scores: scores that the heads compete by.
      candidates: slots that compete.
      even: B - W, the even share of each head.
      protected: W, number of protected slots of each head.
    """
    del protected
    if self.normalize:
      scores = self._normalized(scores, candidates, even)
    total = jnp.sum(even, axis=1, dtype=jnp.int32)
    num_best = head_counts(scores, candidates, total)
    # In integers, so that equal remainders compare as equal.
    alpha = exact_share(self.alpha)
    # n_j + alpha (B - W - n_j), rounded down. Whole multiples of the
    # denominator are split off first, so that no product overflows 32 bits.
    quotients, remainders = jnp.divmod(even - num_best, alpha.denominator)
    floors, remainders = jnp.divmod(
      remainders * alpha.numerator, alpha.denominator
    )
    shares = num_best + quotients * alpha.numerator + floors
    # The n_j add up to g (B - W), so fewer slots remain than there are heads.
    remaining = total[:, None] - jnp.sum(
      shares, axis=1, keepdims=True, dtype=jnp.int32
    )
    next_scores = _best_after(scores, candidates, shares)
    # The last key counts first, and the sort is stable: equal heads in order.
    # Its argsort is the place of each head.
    order = jnp.lexsort((-next_scores, -remainders))
    place = jnp.argsort(order, axis=-1).astype(jnp.int32)
    return shares + (place < remaining).astype(jnp.int32)

  def _normalized(
    self,
    scores: Float[Array, "B K T"],
    candidates: Bool[Array, "B K T"],
    even: Int[Array, "B K"],
  ) -> Float[Array, "B K T"]:
    return scores * _mass_of_best(scores, candidates, even)[..., None]


def _count(slots: Bool[Array, "B K T"]) -> Int[Array, "B K"]:
  return jnp.sum(slots, axis=-1, dtype=jnp.int32)


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
  """Share of the sum of a head's scores in its `counts` best."""
  known = candidates & jnp.isfinite(scores)
  among = among_largest(jnp.where(known, scores, -jnp.inf), counts)
  total = jnp.sum(scores, axis=-1, where=known)
  best = jnp.sum(scores, axis=-1, where=among)
  return jnp.where(total > 0, best / jnp.where(total > 0, total, 1.0), 1.0)
