"""FullKV: the uncompressed cache."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.methods.base import ScoringMethod
from kvjax.methods.traits import Traits


@dataclasses.dataclass(frozen=True)
class FullKV(ScoringMethod):
  """Keeps everything, whatever the budget, as the baseline."""

  @property
  def traits(self) -> Traits:
    """It keeps everything, so there is no budget to spread."""
    return Traits(keeps_all=True, even="it keeps everything", queries=0)

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Gives every token the same score."""
    del layer, activations
    return jnp.zeros(cache.positions.shape, jnp.float32)
