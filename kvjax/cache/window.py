"""The ring of a local layer, which sees a window of recent tokens."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.base import Index, Layer
from kvjax.kernels.attention import merge, partial_attention, with_sinks
from kvjax.struct import struct


@struct
class WindowLayer(Layer):
  """The last W tokens of every row; the token at position p is in slot p mod W.

  No method chooses among them. Rows go on by themselves: what one has seen
  leaves no holes in the ring of another.

  Attributes:
    keys: rotated keys.
    values: values.
    positions: each token's place in its row; -1 for an empty slot.
  """

  keys: Float[Array, "B K W D"]
  values: Float[Array, "B K W Dv"]
  positions: Int[Array, "B K W"]

  @classmethod
  def of(cls, activations: Activations, window: int) -> "WindowLayer":
    """The last tokens of a prompt.

    Args:
      activations: of rows that begin with the block.
      window: W.
    """
    batch, kv_heads, _, dim = activations.keys.shape
    shape, width = (batch, kv_heads, window), activations.values.shape[-1]
    empty = cls(
      jnp.zeros((*shape, dim), activations.keys.dtype),
      jnp.zeros((*shape, width), activations.values.dtype),
      jnp.full(shape, -1, jnp.int32),
    )
    return empty.append(activations)

  @property
  def capacity(self) -> None:
    """Any number of tokens can be appended."""
    return

  @property
  def next_slot(self) -> Int[Array, "*L"]:
    """No slot is ever the last."""
    return jnp.zeros(self.positions.shape[:-3], jnp.int32)

  @property
  def lengths(self) -> Int[Array, "*L B K"]:
    """Tokens held per row and KV head."""
    return jnp.sum((self.positions >= 0).astype(jnp.int32), axis=-1)

  def grown(self, extra: int) -> "WindowLayer":
    """The same: a ring has room for ever."""
    del extra
    return self

  def map_slots(self, change: Callable[[Any], Any]) -> "WindowLayer":
    """See `Layer.map_slots`."""
    changed: WindowLayer = change(self)
    return changed

  def row_positions(self, row: int) -> list[list[int]]:
    """See `Layer.row_positions`."""
    heads = np.asarray(self.positions)[row]
    return [sorted(int(p) for p in head if p >= 0) for head in heads]

  def append(
    self, activations: Activations, index: Index = None
  ) -> "WindowLayer":
    """Writes the last tokens of a block over those that have left the window.

    A row's tokens in the block follow each other, its padding is at their end.
    """
    layer = self.at(index)
    places, window = activations.positions, layer.positions.shape[-1]
    count = jnp.sum((places >= 0).astype(jnp.int32), axis=1)
    first, last = places[:, 0], jnp.max(places, axis=1)
    slot = jnp.arange(window, dtype=jnp.int32)[None]
    # The newest position that belongs into each slot.
    newest = last[:, None] - (last[:, None] - slot) % window
    fresh = (count[:, None] > 0) & (newest >= first[:, None])
    source = jnp.where(fresh, newest - first[:, None], 0)

    def write(
      old: Float[Array, "B K W D"], new: Float[Array, "B K S D"]
    ) -> Float[Array, "B K W D"]:
      own = jnp.take_along_axis(new, source[:, None, :, None], axis=2)
      return jnp.where(fresh[:, None, :, None], own.astype(old.dtype), old)

    after = WindowLayer(
      write(layer.keys, activations.keys),
      write(layer.values, activations.values),
      jnp.where(fresh[:, None], newest[:, None], layer.positions),
    )
    return self.put(index, layer, after)

  def attend(
    self, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], "WindowLayer"]:
    """Attention to the ring, in which the block is."""
    found = partial_attention(
      activations.queries,
      self.keys,
      self.values,
      activations.positions,
      self.positions,
      options=activations.attention,
    )
    if activations.sinks is not None:
      found = with_sinks(found, activations.sinks)
    return found.output, self

  def step(
    self,
    index: Index,
    activations: Activations,
    arrange: Callable[[Any], Any] | None = None,
  ) -> tuple[Float[Array, "B N S Dv"], "WindowLayer"]:
    """Attends to the ring and the block, and then writes the block.

    The first tokens of a block see what its last ones take the place of.
    """
    del arrange
    layer, options = self.at(index), activations.attention
    batch, length = activations.positions.shape
    kv_heads = activations.keys.shape[1]
    places = jnp.broadcast_to(
      activations.positions[:, None], (batch, kv_heads, length)
    )
    before, own = (
      partial_attention(
        activations.queries,
        keys,
        values,
        activations.positions,
        positions,
        options=options,
      )
      for keys, values, positions in (
        (layer.keys, layer.values, layer.positions),
        (activations.keys, activations.values, places),
      )
    )
    found = merge(before, own)
    if activations.sinks is not None:
      found = with_sinks(found, activations.sinks)
    return found.output, self.append(activations, index)
