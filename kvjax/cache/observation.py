"""The observation window: the last queries, carried from block to block."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.struct import struct


@struct
class ObservationWindow:
  """The last W queries that a layer has seen of each row.

  Attributes:
    queries: rotated queries in the order of their positions, at the end; a row
      that has seen fewer than W has anything before them.
    positions: their places, -1 where there is no query yet.
  """

  queries: Float[Array, "B N W D"]
  positions: Int[Array, "B W"]

  @classmethod
  def empty(cls, seen: Activations, width: int) -> "ObservationWindow":
    """A window of W = `width` that has seen nothing."""
    batch, heads, _, dim = seen.queries.shape
    return cls(
      jnp.zeros((batch, heads, width, dim), seen.queries.dtype),
      jnp.full((batch, width), -1, jnp.int32),
    )

  def after(self, seen: Activations) -> "ObservationWindow":
    """The window once the block has been seen, whose padding is at its end."""
    width = self.positions.shape[1]
    queries = jnp.concatenate([self.queries, seen.queries], axis=2)
    positions = jnp.concatenate([self.positions, seen.positions], axis=1)
    # Real queries are one run: those of the window end it, the block goes on.
    start = jnp.sum((seen.positions >= 0).astype(jnp.int32), axis=1)
    take = jax.lax.dynamic_slice_in_dim
    return ObservationWindow(
      jax.vmap(lambda x, at: take(x, at, width, axis=1))(queries, start),
      jax.vmap(lambda x, at: take(x, at, width))(positions, start),
    )
