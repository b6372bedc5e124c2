"""Random eviction."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.methods.base import ScoringMethod
from kvjax.methods.traits import Traits


@dataclasses.dataclass(frozen=True)
class Random(ScoringMethod):
  """Draws independent uniform scores per layer, KV head and position.

  A token's score depends on nothing else. Neither padding nor the other rows
  nor the schedule change what is kept.

  Attributes:
    seed: seed of all scores.
  """

  seed: int = 0

  @property
  def traits(self) -> Traits:
    """Its selection is random."""
    return Traits(stochastic=True)

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Draws scores in [0, 1)."""
    del activations
    key = jax.random.fold_in(jax.random.key(self.seed), layer)
    kv_heads = cache.positions.shape[1]
    heads = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(kv_heads))

    def score(head: Array, position: Int[Array, ""]) -> Float[Array, ""]:
      return jax.random.uniform(jax.random.fold_in(head, position))

    per_head = jax.vmap(score, in_axes=(None, 0))
    return jax.vmap(jax.vmap(per_head), in_axes=(None, 0))(
      heads, jnp.maximum(cache.positions, 0)
    )
