"""A tiny model whose decoded tokens have keys of their own."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.testing import TinyModel


@dataclasses.dataclass(frozen=True)
class Placed(TinyModel):
  """Embeddings depend on positions: decoded tokens repeat, their keys do not.

  Equal tokens would have keys of equal norms, a tie that falls as rounding
  falls.
  """

  def embed(self, params, tokens, positions):
    def shift(position):
      key = jax.random.fold_in(jax.random.key(1), position)
      return 0.3 * jax.random.normal(key, (self.width,))

    hidden, shared = super().embed(params, tokens, positions)
    return hidden + jax.vmap(jax.vmap(shift))(jnp.maximum(positions, 0)), shared
