"""Layers of kept tokens, which stay as they are, and of those that follow."""

from typing import Self

from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.base import Index, Layer, LayerSizes
from kvjax.cache.layers import Slots, attend_partially, attention_output
from kvjax.kernels.attention import Partial, merge
from kvjax.struct import replace


class TailedLayer(Layer):
  """Base class of layers that append tokens to a part of its own, the tail.

  Attributes:
    tail: tokens appended since the others were kept, in the same slots for all
      heads of a layer.
  """

  tail: Slots

  @property
  def capacity(self) -> int:
    """Slots of the tail, where new tokens are written."""
    return self.tail.capacity

  @property
  def sizes(self) -> LayerSizes:
    """Heads and widths of the tail, which has all of them."""
    return self.tail.sizes

  @property
  def next_slot(self) -> Int[Array, "*L"]:
    """The next slot of the tail to write."""
    return self.tail.cursor

  def grow(self, extra: int) -> Self:
    """Adds `extra` empty slots to the tail."""
    return replace(self, tail=self.tail.grow(extra))

  def append(self, activations: Activations, index: Index = None) -> Self:
    """Writes a block to the tail; there must be room for it."""
    return replace(self, tail=self.tail.append(activations, index))

  def _attend_with_tail(
    self, activations: Activations, kept: Partial
  ) -> Float[Array, "B N S Dv"]:
    """Attends to the tail, and merges it with the attention of the rest."""
    # A tail has no slots until the cache is first grown.
    if self.tail.capacity:
      kept = merge(kept, attend_partially(self.tail, activations))
    return attention_output(kept, activations)
