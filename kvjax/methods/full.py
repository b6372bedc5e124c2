"""FullKV: nothing is evicted."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.methods.base import ScoringMethod
from kvjax.methods.traits import Traits


@dataclasses.dataclass(frozen=True)
class FullKV(ScoringMethod):
  """The uncompressed cache, whatever the budget: the yardstick."""

  @property
  def traits(self) -> Traits:
    """Nothing is evicted, and there is no budget to spread."""
    return Traits(keeps_all=True, even="it keeps everything")

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Every token is worth the same."""
    del layer, activations
    return jnp.zeros(cache.positions.shape, jnp.float32)
