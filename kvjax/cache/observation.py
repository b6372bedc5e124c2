"""The observation window: the last queries, carried from block to block."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.row_ends import row_ends
from kvjax.kernels.mesh_axes import DATA, HEADS
from kvjax.struct import replace, struct


@struct
class ObservationWindow:
  """The last W queries of each row in one layer.

  Attributes:
    queries: rotated queries in the order of their positions. In a row with
      fewer than W, they are at the end, after arbitrary values.
    positions: positions of the queries; -1 where there is no query yet.
    sinks: the layer's attention sinks, if it has any, for every row.
  """

  queries: Float[Array, "B N W D"]
  positions: Int[Array, "B W"]
  sinks: Float[Array, "B N"] | None = None

  @classmethod
  def empty(cls, activations: Activations, width: int) -> "ObservationWindow":
    """Makes a window of W = `width` without any query."""
    batch, heads, _, dim = activations.queries.shape
    return cls(
      jnp.zeros((batch, heads, width, dim), activations.queries.dtype),
      jnp.full((batch, width), -1, jnp.int32),
      _sinks_of(activations),
    )

  def append(self, activations: Activations) -> "ObservationWindow":
    """Appends a block, whose padding is at its end."""
    width = self.positions.shape[1]
    # No more than W of them can be among the last.
    size = min(width, activations.queries.shape[2])
    queries, positions = row_ends(
      activations.queries, activations.query_positions, size
    )
    # Real queries are contiguous: they end the window and begin the block.
    start = jnp.sum(positions >= 0, axis=1, dtype=jnp.int32)
    queries = jnp.concatenate([self.queries, queries], axis=2)
    positions = jnp.concatenate([self.positions, positions], axis=1)
    if activations.positions.shape[1] == 1:
      # In every step of decoding: selecting costs less than slicing by rows.
      real = activations.positions >= 0
      return ObservationWindow(
        jnp.where(real[:, None, None], queries[:, :, 1:], self.queries),
        jnp.where(real, positions[:, 1:], self.positions),
        _sinks_of(activations),
      )
    take = jax.lax.dynamic_slice_in_dim
    return ObservationWindow(
      jax.vmap(lambda x, at: take(x, at, width, axis=1))(queries, start),
      jax.vmap(lambda x, at: take(x, at, width))(positions, start),
      _sinks_of(activations),
    )

  def place(
    self, place_tree: Callable[[Any, Sequence[str]], Any]
  ) -> "ObservationWindow":
    """Places the arrays on a mesh, queries where the weights compute them.

    Spread further, over devices that have the same KV heads, they would split
    these heads, too, and every step would gather all keys and values.
    """
    queries, sinks = place_tree((self.queries, self.sinks), (DATA, HEADS))
    positions = place_tree(self.positions, (DATA,))
    return replace(self, queries=queries, positions=positions, sinks=sinks)


def _sinks_of(activations: Activations) -> Float[Array, "B N"] | None:
  if activations.sinks is None:
    return None
  return jnp.broadcast_to(activations.sinks, activations.queries.shape[:2])
