"""AdaKV with kvpress's safeguard: every head keeps its best slots first."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.allocation.adaptive import Adaptive
from kvjax.kernels.select import among_largest
from kvjax.selection import exact_share, finite, floor_share, head_counts


@dataclasses.dataclass(frozen=True)
class Floored(Adaptive):
  """Spreads the budget of a layer over its KV heads, above a floor.

  B is the budget per head. Each head keeps its best floor(alpha B) slots,
  protected ones first, and at least one if alpha is not 0. The best of the
  other slots of all heads, protected ones first, fill the layer's budget of
  g B slots. Attributes are those of `Adaptive`.

  Source: kvpress's AdaKVPress, after Feng et al., arXiv 2407.11550.
  """

  def _most(self, kv_heads: int, capacity: int) -> int:
    """Maximum slots of a head, which it has if the others have the floor."""
    least = math.floor(exact_share(self.alpha) * capacity)
    return kv_heads * capacity - (kv_heads - 1) * least

  def _safe(self, mean: Int[Array, " B #K"]) -> Int[Array, " B #K"]:
    """The floor of B slots."""
    floor = floor_share(mean, self.alpha)
    return jnp.maximum(floor, 1) if self.alpha else floor

  def _shares(
    self,
    scores: Float[Array, "B K T"],
    candidates: Bool[Array, "B K T"],
    even: Int[Array, "B K"],
    protected: Int[Array, "B K"],
  ) -> Int[Array, "B K"]:
    """Number of slots of each head besides its protected ones."""
    if self.normalize:
      scores = self._normalized(scores, candidates, even)
    # even + protected is B; protected slots count toward the floor.
    floor = jnp.clip(self._safe(even + protected) - protected, 0, even)
    ranked = jnp.where(candidates, finite(scores), -jnp.inf)
    free = candidates & ~among_largest(ranked, floor)
    total = jnp.sum(even - floor, axis=1, dtype=jnp.int32)
    return floor + head_counts(scores, free, total)
