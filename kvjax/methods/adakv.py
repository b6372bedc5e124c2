"""AdaKV: heads with much to remember keep more, the others less."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.kernels.select import among_largest, kth_largest
from kvjax.methods.base import Allowance, Method, ScoringMethod
from kvjax.methods.selection import exact_share, head_counts, top_slots
from kvjax.methods.snapkv import SnapKV
from kvjax.options.bounds import check_share
from kvjax.options.budgets import Budget


@dataclasses.dataclass(frozen=True)
class AdaKV(Method):
  """Spreads the budget of another method over the KV heads of a layer.

  With W slots protected by the other method and a budget of B per head, n_j is
  what head j has among the g (B - W) best slots of all g heads of a layer. It
  keeps its window and its best (1 - alpha) n_j + alpha (B - W) slots. These are
  rounded down, and what that leaves over goes, a slot each, to the heads of the
  largest remainder; where remainders are equal, to the one whose next slot has
  the higher score, then to the lower head. So a layer keeps exactly g B, and
  each head its share rounded down or up.

  A method that ranks more than single slots (ProtoKV's clusters, ChunkKV's
  chunks) shares out by the votes of SnapKV with its window, and then chooses
  within each head's share.

  Source: Feng et al., arXiv 2407.11550, Algorithm 1, with the safeguard of the
  authors' code.

  Attributes:
    inner: the method that chooses; SnapKV as in the authors' code.
    alpha: share of the budget that is spread evenly, to three decimals; with 1
      all heads keep the same.
    normalize: scale a head's scores, where heads are compared, by the share of
      their sum that its own B - W best have; for scores that are not negative.
  """

  whole_prompts_only: ClassVar[str] = (
    "it shares out the budget once, when the prompt is known"
  )

  inner: Method = SnapKV(window=32, kernel=7, pooling="max")
  alpha: float = 0.2
  normalize: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    self.inner.check_spread()
    if self.inner.packed:
      raise InputError(
        f"The heads of {type(self.inner).__name__} have unequal shares "
        "already; give AdaKV a method whose heads keep as many."
      )
    if not isinstance(self.inner, ScoringMethod) and not self.window:
      raise InputError(
        "AdaKV compares the scores of slots or the votes of an observation "
        f"window; {type(self.inner).__name__} has neither."
      )
    check_share(self, "alpha")

  @property
  def window(self) -> int:
    """Last tokens that the inner method always keeps."""
    return getattr(self.inner, "window", 0)

  @property
  def packed(self) -> bool:
    """Heads keep different numbers."""
    return True

  def source_layer(self, layer: int) -> int:
    """As the inner method."""
    return self.inner.source_layer(layer)

  def kept(self, budget: Budget, length: int) -> int:
    """B of a row of `length` tokens: what its heads keep on average."""
    return self.inner.kept(budget, length)

  def capacity(self, budget: Budget, padded: int) -> int:
    """Most that the heads of a row of the bucket keep on average."""
    return self.inner.capacity(budget, padded)

  @property
  def why_even(self) -> str:
    """Layers may get unequal shares; heads do."""
    return self.inner.why_even

  def evaluate(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> tuple[Float[Array, "B K T"], PyTree[Array]]:
    """The scores that heads compete with, and what the inner method found."""
    scores = self._judge.evaluate(layer, cache, seen)
    if self._judge is self.inner:
      return scores, None
    return scores, self.inner.evaluate(layer, cache, seen)

  def select(
    self,
    found: tuple[Float[Array, "B K T"], PyTree[Array]],
    cache: LayerCache,
    allowance: Allowance,
  ) -> Int[Array, "B K M"]:
    """What the inner method chooses of each head, as much as it is due.

    The heads of a row have `allowance.counts` slots on average; M is the most
    that one of them can have.
    """
    scores, inner_found = found
    held = cache.held
    must_keep = allowance.must_keep(cache)
    protected = self._judge.protected(cache, allowance.per_head) & held
    protected |= must_keep
    budget = allowance.per_head
    always = jnp.minimum(_count(protected), budget)
    counts = always + self._shares(
      scores, held & ~protected, jnp.minimum(_count(held), budget) - always
    )
    _, kv_heads, slots = held.shape
    most = min(self._most(kv_heads, allowance.capacity), slots)
    if self._judge is self.inner:
      return top_slots(scores, held, protected, counts, most, must_keep)
    own = dataclasses.replace(allowance, counts=counts, capacity=most)
    return self.inner.select(inner_found, cache, own)

  @property
  def _judge(self) -> ScoringMethod:
    """The method whose scores heads compete with."""
    if isinstance(self.inner, ScoringMethod):
      return self.inner
    return SnapKV(window=self.window, kernel=7, pooling="max")

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
