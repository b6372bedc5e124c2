"""FullKV: nothing is evicted."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.methods.base import ScoringMethod


@dataclasses.dataclass(frozen=True)
class FullKV(ScoringMethod):
  """The uncompressed cache, whatever the budget: the yardstick."""

  def keeps_all(self, layer: int) -> bool:
    """Always."""
    del layer
    return True

  @property
  def why_even(self) -> str:
    """There is no budget."""
    return "it keeps everything"

  def scores(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> Float[Array, "B K T"]:
    """Every token is worth the same."""
    del layer, seen
    return jnp.zeros(cache.positions.shape, jnp.float32)
