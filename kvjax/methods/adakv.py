"""AdaKV: heads with much to remember keep more, the others less."""

import dataclasses
import math
from fractions import Fraction
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.budgets import Budget
from kvjax.errors import InputError
from kvjax.layers import LayerCache
from kvjax.methods.base import RENUMBERED, Allowance, Method, ScoringMethod
from kvjax.methods.snapkv import SnapKV
from kvjax.selection import head_counts, top_slots


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

  Source: Feng et al., arXiv 2407.11550, Algorithm 1, with the safeguard of the
  authors' code.

  Attributes:
    inner: the method that scores; SnapKV as in the authors' code.
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
    if not isinstance(self.inner, ScoringMethod):
      raise InputError(
        "AdaKV compares the scores of slots; give it a method that scores "
        f"every slot, which {type(self.inner).__name__} does not."
      )
    if self.inner.rerotates:
      raise InputError(RENUMBERED)
    if not 0 <= self.alpha <= 1:
      raise InputError(f"alpha must be 0 to 1; {self.alpha:g} is not.")

  @property
  def window(self) -> int:
    """Last tokens that the inner method always keeps."""
    return getattr(self.inner, "window", 0)

  @property
  def packed(self) -> bool:
    """Heads keep different numbers."""
    return True

  def keeps_all(self, layer: int) -> bool:
    """As the inner method."""
    return self.inner.keeps_all(layer)

  def kept(self, budget: Budget, length: int) -> int:
    """B of a row of `length` tokens: what its heads keep on average."""
    return self.inner.kept(budget, length)

  def capacity(self, budget: Budget, padded: int) -> int:
    """Most that the heads of a row of the bucket keep on average."""
    return self.inner.capacity(budget, padded)

  def evaluate(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> Float[Array, "B K T"]:
    """The inner method's scores."""
    return self.inner.evaluate(layer, cache, seen)

  def select(
    self, found: Float[Array, "B K T"], cache: LayerCache, allowance: Allowance
  ) -> Int[Array, "B K M"]:
    """The best slots of each head, as many as it is due.

    The heads of a row have `allowance.counts` slots on average; M is the most
    that one of them can have.
    """
    assert isinstance(self.inner, ScoringMethod)
    held = cache.positions >= 0
    protected = held & self.inner.protected(cache, allowance.counts)
    protected |= allowance.must_keep(cache)
    budget = allowance.counts[:, None]
    always = jnp.minimum(_count(protected), budget)
    counts = always + self._shares(
      found, held & ~protected, jnp.minimum(_count(held), budget) - always
    )
    _, kv_heads, slots = held.shape
    most = self._most(kv_heads, allowance.capacity)
    must_keep = allowance.must_keep(cache)
    most = min(most, slots)
    return top_slots(found, held, protected, counts, most, must_keep)

  def _most(self, kv_heads: int, capacity: int) -> int:
    """Most slots of a head: all winners are its own."""
    alpha = _exact(self.alpha)
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
    alpha = _exact(self.alpha)
    steps, rest = jnp.divmod(even - wanted, alpha.denominator)
    whole, rest = jnp.divmod(rest * alpha.numerator, alpha.denominator)
    shares = wanted + steps * alpha.numerator + whole
    left = jnp.sum(even - shares, axis=1, keepdims=True)
    following = _best_after(scores, candidates, shares)
    order = jnp.lexsort((-following, -rest))
    return shares + (jnp.argsort(order, axis=-1) < left).astype(jnp.int32)


def _exact(alpha: float) -> Fraction:
  return Fraction(alpha).limit_denominator(1000)


def _count(slots: Bool[Array, "B K T"]) -> Int[Array, "B K"]:
  return jnp.sum(slots.astype(jnp.int32), axis=-1)


def _descending(
  scores: Float[Array, "B K T"],
  candidates: Bool[Array, "B K T"],
  otherwise: float,
) -> Float[Array, "B K T"]:
  """Scores of the candidates from the highest on, then the rest."""
  known = candidates & jnp.isfinite(scores)
  return -jnp.sort(-jnp.where(known, scores, otherwise), axis=-1)


def _best_after(
  scores: Float[Array, "B K T"],
  candidates: Bool[Array, "B K T"],
  counts: Int[Array, "B K"],
) -> Float[Array, "B K"]:
  """Each head's highest score after its `counts` best."""
  ranked = _descending(scores, candidates, -jnp.inf)
  index = jnp.minimum(counts, scores.shape[-1] - 1)[..., None]
  return jnp.take_along_axis(ranked, index, axis=-1)[..., 0]


def _mass_of_best(
  scores: Float[Array, "B K T"],
  candidates: Bool[Array, "B K T"],
  counts: Int[Array, "B K"],
) -> Float[Array, "B K"]:
  """Share of the sum of a head's scores that its `counts` best have."""
  ranked = _descending(scores, candidates, 0.0)
  among = jnp.arange(scores.shape[-1])[None, None] < counts[..., None]
  total = jnp.sum(ranked, axis=-1)
  best = jnp.sum(jnp.where(among, ranked, 0.0), axis=-1)
  return jnp.where(total > 0, best / jnp.where(total > 0, total, 1.0), 1.0)
