"""A layer's cache whose kept keys have fewer channels."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.base import Arrange, Index, Layer
from kvjax.cache.layers import LayerCache, Slots
from kvjax.cache.tailed import TailedLayer
from kvjax.kernels.attention import partial_attention
from kvjax.kernels.layouts import whole_tiles
from kvjax.struct import replace, struct


@struct
class NarrowLayer(TailedLayer):
  """The kept tokens of a layer, with some channels of their keys, and the rest.

  Attributes:
    kept: tokens that were kept; their keys have C channels.
    channels: the channels of each head, of those of a whole key.
    tail: tokens appended since, with whole keys.
  """

  kept: Slots
  channels: Int[Array, "B K C"]
  tail: Slots

  @classmethod
  def of(
    cls, cache: LayerCache, channels: Int[Array, "B K C"]
  ) -> "NarrowLayer":
    """Drops channels of all keys of a cache; the tail has no room yet."""
    cache = cache.without_memory()
    # `Cache.grow` grows the tail alone.
    whole = cache.grow(whole_tiles(cache.capacity) - cache.capacity)
    keys = jnp.take_along_axis(whole.keys, channels[:, :, None], axis=3)
    kept = Slots(keys, whole.values, whole.positions, whole.cursor)
    return cls(kept, channels, cache.shrink(0))

  @property
  def lengths(self) -> Int[Array, "*L B K"]:
    """Number of tokens per row and KV head."""
    return self.kept.lengths + self.tail.lengths

  def grown_like(self, other: Layer) -> "NarrowLayer":
    """Grows to the kept tokens and the tail of another layer of its kind."""
    assert isinstance(other, NarrowLayer)
    kept, tail = (
      self.kept.grown_like(other.kept),
      self.tail.grown_like(other.tail),
    )
    return replace(self, kept=kept, tail=tail)

  def map_slots(self, change: Callable[[Any], Any]) -> "NarrowLayer":
    """Changes the tail, whose keys are whole, and the kept tokens."""
    tail = self.tail.map_slots(change)
    return replace(self, tail=tail, kept=self.kept.map_slots(change))

  def row_positions(
    self, row: int, index: int | None = None
  ) -> list[list[int]]:
    """Positions of the tokens of a row, per KV head; on the host."""
    kept = self.kept.row_positions(row, index)
    new = self.tail.row_positions(row, index)
    return [one + other for one, other in zip(kept, new, strict=True)]

  def attend(
    self, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], "NarrowLayer"]:
    """Attends to the kept tokens and the tail."""
    return self._attend(activations, self.kept, None), self

  def step(
    self, activations: Activations, index: Index, arrange: Arrange | None = None
  ) -> tuple[Float[Array, "B N S Dv"], "NarrowLayer"]:
    """Appends a block and attends; keys are never rerotated here."""
    assert arrange is None
    stack = self.append(activations, index)
    # Kept tokens are read in place: slicing a layer would copy them.
    empty = replace(stack.kept, keys=None, values=None)
    layer = replace(stack, kept=empty).at(index)
    kept = replace(layer.kept, keys=stack.kept.keys, values=stack.kept.values)
    return layer._attend(activations, kept, index), stack

  def _attend(
    self, activations: Activations, kept: Slots, layer: Index
  ) -> Float[Array, "B N S Dv"]:
    """Attends to kept tokens, maybe those of a stack, and to the tail."""
    queries, options = activations.queries, activations.attention
    group = queries.shape[1] // self.channels.shape[1]
    own = jnp.repeat(self.channels, group, axis=1)[:, :, None]
    partial = partial_attention(
      jnp.take_along_axis(queries, own, axis=3),
      kept.keys,
      kept.values,
      activations.positions,
      kept.positions,
      # Products of fewer channels are still products of whole keys.
      options=dataclasses.replace(
        options, scale=options.scale_of(queries.shape[3])
      ),
      layer=layer,
    )
    return self._attend_with_tail(activations, partial)
