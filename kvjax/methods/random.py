"""Random eviction."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.methods.base import ScoringMethod
from kvjax.methods.traits import Traits


@dataclasses.dataclass(frozen=True)
class Random(ScoringMethod):
  """Draws independent uniform scores per layer, KV head and token.

  The seed of a token's score is its position and the signs of its key. Prompts
  thus have scores of their own from where they differ, and neither padding nor
  the other rows nor the schedule change what is kept.

  Attributes:
    seed: seed of all scores.
  """

  seed: int = 0

  @property
  def traits(self) -> Traits:
    """Its selection is random."""
    return Traits(stochastic=True, queries=0)

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Draws scores in [0, 1)."""
    del activations
    key = jax.random.fold_in(jax.random.key(self.seed), layer)
    kv_heads = cache.positions.shape[1]
    heads = jax.vmap(jax.random.fold_in, (None, 0))(
      key, jnp.arange(kv_heads, dtype=jnp.int32)
    )

    dim = cache.keys.shape[-1]
    factors = jax.random.bits(key, (1, 1, 1, dim), jnp.uint32)
    signs = (cache.keys > 0).astype(jnp.uint32)
    # A random word per dimension, added modulo 2^32 where the key is positive.
    hashes = jnp.sum(signs * factors, axis=-1, dtype=jnp.uint32)

    def score(
      head: PRNGKeyArray, position: Int[Array, ""], hashed: UInt[Array, ""]
    ) -> Float[Array, ""]:
      token = jax.random.fold_in(jax.random.fold_in(head, position), hashed)
      return jax.random.uniform(token, (), jnp.float32)

    per_head = jax.vmap(score, in_axes=(None, 0, 0))
    return jax.vmap(jax.vmap(per_head), in_axes=(None, 0, 0))(
      heads, jnp.maximum(cache.positions, 0), hashes
    )
