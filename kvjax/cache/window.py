"""The cache of a layer with sliding-window attention."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.base import Arrange, Index, Layer, LayerSizes, host_copy
from kvjax.cache.layers import LayerCache, attend_partially, attention_output
from kvjax.cache.row_ends import row_ends
from kvjax.kernels.attention import merge
from kvjax.struct import struct


@struct
class WindowLayer(Layer):
  """The last W tokens of every row; the token at position p is in slot p mod W.

  No method evicts from it. Rows advance independently: padding of one row
  leaves no empty slots in another.

  Attributes:
    keys: rotated keys.
    values: values.
    positions: position of each token in its row; -1 for an empty slot.
  """

  keys: Float[Array, "B K W D"]
  values: Float[Array, "B K W Dv"]
  positions: Int[Array, "B K W"]

  @classmethod
  def of(cls, activations: Activations, window: int) -> "WindowLayer":
    """Caches the last tokens of a prompt.

    Args:
      activations: activations of the prompt.
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
    """None: any number of tokens can be appended."""
    return

  @property
  def sizes(self) -> LayerSizes:
    """Heads, widths and window of the arrays."""
    *_, kv_heads, window, key_width = self.keys.shape
    return LayerSizes(kv_heads, key_width, self.values.shape[-1], window)

  @property
  def next_slot(self) -> Int[Array, "*L"]:
    """Zero: a ring never runs out of slots."""
    return jnp.zeros(self.positions.shape[:-3], jnp.int32)

  @property
  def lengths(self) -> Int[Array, "*L B K"]:
    """Number of tokens per row and KV head."""
    return jnp.sum(self.positions >= 0, axis=-1, dtype=jnp.int32)

  def grow(self, extra: int) -> "WindowLayer":
    """Returns the layer itself, as a ring needs no more room."""
    del extra
    return self

  def map_slots(self, change: Callable[[Any], Any]) -> "WindowLayer":
    """Changes every part that has keys, values and positions."""
    changed: WindowLayer = change(self)
    return changed

  def row_positions(
    self, row: int, index: int | None = None
  ) -> list[list[int]]:
    """Positions of the tokens of a row, per KV head; on the host."""
    heads = host_copy(self.positions, index)[row]
    return [sorted(int(p) for p in head if p >= 0) for head in heads]

  def append(
    self, activations: Activations, index: Index = None
  ) -> "WindowLayer":
    """Overwrites tokens that have left the window with those of a block.

    A row's tokens in the block are contiguous, with its padding at the end.
    """
    layer = self.at(index)
    window = layer.positions.shape[-1]
    # Of a block longer than W, only the last W tokens are written.
    size = min(window, activations.positions.shape[1])
    (keys, values), block_positions = row_ends(
      (activations.keys, activations.values), activations.positions, size
    )
    # A row without tokens in the block has first = last = -1: `count` masks it.
    count = jnp.sum(block_positions >= 0, axis=1, dtype=jnp.int32)
    first, last = block_positions[:, 0], jnp.max(block_positions, axis=1)
    slot = jnp.arange(window, dtype=jnp.int32)[None]
    # The newest position that belongs in each slot.
    newest = last[:, None] - (last[:, None] - slot) % window
    # A slot whose newest position precedes the block keeps its token.
    written = (count[:, None] > 0) & (newest >= first[:, None])
    source = jnp.where(written, newest - first[:, None], 0)

    def write(
      old: Float[Array, "B K W D"], new: Float[Array, "B K S D"]
    ) -> Float[Array, "B K W D"]:
      gathered = jnp.take_along_axis(new, source[:, None, :, None], axis=2)
      return jnp.where(
        written[:, None, :, None], gathered.astype(old.dtype), old
      )

    updated = WindowLayer(
      write(layer.keys, keys),
      write(layer.values, values),
      jnp.where(written[:, None], newest[:, None], layer.positions),
    )
    return self.put(index, layer, updated)

  def attend(
    self, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], "WindowLayer"]:
    """Attends to the ring, which already contains the block."""
    partial = attend_partially(self, activations)
    return attention_output(partial, activations), self

  def step(
    self, activations: Activations, index: Index, arrange: Arrange | None = None
  ) -> tuple[Float[Array, "B N S Dv"], "WindowLayer"]:
    """Attends to the ring and the block, then appends the block.

    In this order, because the first tokens of a block see tokens that its last
    ones overwrite.
    """
    del arrange
    # The barrier makes XLA take the layer out of its stack once. Otherwise it
    # copies the whole stack, to read the old ring while it writes the new one.
    layer = jax.lax.optimization_barrier(self.at(index))
    # Stale tokens of the ring are masked by their positions.
    ring = attend_partially(layer, activations)
    block = attend_partially(LayerCache.of(activations), activations)
    output = attention_output(merge(ring, block), activations)
    return output, self.put(index, layer, layer.append(activations))
