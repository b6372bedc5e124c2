"""A layer's cache whose KV heads hold different numbers of tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.base import AXES, Arrange, Index, Layer
from kvjax.cache.layers import KV_DTYPES, LayerCache, Slots
from kvjax.kernels.attention import merge, partial_attention, with_sinks
from kvjax.kernels.gather import compact
from kvjax.kernels.paged_attention import paged_attention
from kvjax.kernels.quantized import Quantized, quantize
from kvjax.struct import struct, updated

# Slots per page. Up to P - 1 slots per head stay empty; with smaller pages a
# question takes more passes over them (`paged_attention`).
PAGE = 32


@struct
class Pages:
  """Keys and values in R pages of P slots per row, each page of one KV head.

  A row's pages are those of its head 0, then of head 1, and so on, then unused
  ones; a head's tokens fill its pages in the order of their positions, and
  only its last page has empty slots. R is the same for all rows: no axis but B
  can be spread over a mesh.

  Attributes:
    keys: rotated keys; empty slots and unused pages hold anything.
    values: values, likewise.
    positions: each token's place in its uncompressed row; -1 for empty.
    heads: KV head of each page; -1 for an unused page.
  """

  keys: Float[Array, "B R P D"] | Quantized
  values: Float[Array, "B R P Dv"] | Quantized
  positions: Int[Array, "B R P"]
  heads: Int[Array, "B R"]

  @classmethod
  def of(
    cls, cache: LayerCache, slots: Int[Array, "B K M"], total: int, page: int
  ) -> "Pages":
    """Gathers slots into pages; see `PackedLayer.of`."""
    heads, chosen = _layout(slots, total, page)
    batch, kv_heads, capacity, _ = cache.keys.shape
    # A row's heads one after the other are one long head, and so are its pages.
    place = heads[..., None] * capacity + chosen
    place = jnp.where(chosen >= 0, place, -1).reshape(batch, 1, -1)
    keys, values, positions = (
      x.reshape(batch, 1, kv_heads * capacity, *x.shape[3:])
      for x in (cache.keys, cache.values, cache.positions)
    )
    kept = compact(keys, values, positions, None, place)
    return cls(
      kept.keys.reshape(*chosen.shape, -1),
      kept.values.reshape(*chosen.shape, -1),
      kept.positions.reshape(chosen.shape),
      heads,
    )

  def lengths(self, kv_heads: int) -> Int[Array, "*L B K"]:
    """Tokens held per row and KV head."""
    valid = jnp.sum((self.positions >= 0).astype(jnp.int32), axis=-1)
    heads = jnp.arange(kv_heads).reshape((1,) * self.heads.ndim + (-1,))
    owns = self.heads[..., None] == heads
    return jnp.sum(jnp.where(owns, valid[..., None], 0), axis=-2)


@struct
class PackedLayer(Layer):
  """What was kept of a layer, in pages, and what came after it.

  The memory of the pages follows the tokens that are kept over all heads, not
  the fullest head.

  Attributes:
    pages: what was kept.
    tail: tokens appended since, for all heads alike.
  """

  pages: Pages
  tail: Slots

  @classmethod
  def of(
    cls,
    cache: LayerCache,
    slots: Int[Array, "B K M"],
    total: int,
    page: int = PAGE,
  ) -> "PackedLayer":
    """The given slots of a cache; the tail has no room yet.

    Args:
      cache: where they are.
      slots: of each head, ascending, then -1; heads hold different numbers.
      total: most slots that a row has over all its heads.
      page: P, slots per page.
    """
    empty = cache.forgetful().shrunk(0)
    return cls(Pages.of(cache, slots, total, page), empty)

  @property
  def capacity(self) -> int:
    """Slots of the tail, where new tokens go."""
    return self.tail.capacity

  @property
  def next_slot(self) -> Int[Array, "*L"]:
    """The next slot of the tail to write."""
    return self.tail.cursor

  @property
  def lengths(self) -> Int[Array, "*L B K"]:
    """Tokens held per row and KV head."""
    kept = self.pages.lengths(self.tail.positions.shape[-2])
    return kept + self.tail.lengths

  def placed(self, place: Callable[[Any, Sequence[str]], Any]) -> "PackedLayer":
    """See `Layer.placed`; pages have no axis of heads."""
    pages = place(self.pages, AXES[:1])
    return updated(self, pages=pages, tail=self.tail.placed(place))

  def grown(self, extra: int) -> "PackedLayer":
    """The same tokens with `extra` more empty slots in the tail."""
    return updated(self, tail=self.tail.grown(extra))

  def append(
    self, activations: Activations, index: Index = None
  ) -> "PackedLayer":
    """Writes a block to the tail; there must be room for it."""
    return updated(self, tail=self.tail.append(activations, index))

  def map_slots(self, change: Callable[[Any], Any]) -> "PackedLayer":
    """See `Layer.map_slots`."""
    tail = self.tail.map_slots(change)
    return updated(self, pages=change(self.pages), tail=tail)

  def row_positions(self, row: int) -> list[list[int]]:
    """See `Layer.row_positions`."""
    found = self.tail.row_positions(row)
    pages, heads = self.pages.positions[row], self.pages.heads[row]
    for page, head in zip(np.asarray(pages), np.asarray(heads), strict=True):
      if head >= 0:
        found[head] += [int(p) for p in page if p >= 0]
    return found

  def quantized(self, kv_dtype: str) -> "PackedLayer":
    """See `Layer.quantized`."""
    pages, dtype = self.pages, KV_DTYPES[kv_dtype]
    assert not isinstance(pages.keys, Quantized)
    assert not isinstance(pages.values, Quantized)
    keys, values = quantize(pages.keys, dtype), quantize(pages.values, dtype)
    tail = self.tail.quantized(kv_dtype)
    return PackedLayer(updated(pages, keys=keys, values=values), tail)

  def attend(
    self, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], "PackedLayer"]:
    """Attention to pages and tail; see `kvjax.kernels.attention.attention`."""
    return self._attend(activations, self.pages, None), self

  def step(
    self,
    index: Index,
    activations: Activations,
    arrange: Arrange | None = None,
  ) -> tuple[Float[Array, "B N S Dv"], "PackedLayer"]:
    """See `Layer.step`; nothing is arranged, as nothing is evicted."""
    assert arrange is None
    stack = self.append(activations, index)
    # Pages are read where they are: a layer's would be copied out of the stack.
    empty = updated(stack.pages, keys=None, values=None)
    layer = updated(stack, pages=empty).at(index)
    pages = updated(
      layer.pages, keys=stack.pages.keys, values=stack.pages.values
    )
    return layer._attend(activations, pages, index), stack

  def _attend(
    self, activations: Activations, pages: Pages, layer: Index
  ) -> Float[Array, "B N S Dv"]:
    """Attention to pages, whose rows may be a stack's, and to the tail."""
    tail, options = self.tail, activations.attention
    queries, query_positions = activations.queries, activations.positions
    found = paged_attention(
      queries,
      pages.keys,
      pages.values,
      query_positions,
      pages.positions,
      pages.heads,
      tail.positions.shape[1],
      options=options,
      layer=layer,
    )
    if tail.capacity:
      new = partial_attention(
        queries,
        tail.keys,
        tail.values,
        query_positions,
        tail.positions,
        options=options,
      )
      found = merge(found, new)
    if activations.sinks is not None:
      found = with_sinks(found, activations.sinks)
    return found.output


def page_count(total: int, kv_heads: int, page: int) -> int:
  """R: pages that `total` tokens need, however the heads share them.

  n_j tokens take ceil(n_j / P) <= (n_j + P - 1) / P pages.
  """
  return (total + kv_heads * (page - 1)) // page


def _layout(
  slots: Int[Array, "B K M"], total: int, page: int
) -> tuple[Int[Array, "B R"], Int[Array, "B R P"]]:
  """The head of each page, and the slots that fill it; -1 for none."""
  batch, kv_heads, most = slots.shape
  counts = jnp.sum((slots >= 0).astype(jnp.int32), axis=-1)
  needed = (counts + page - 1) // page
  ends = jnp.cumsum(needed, axis=-1)
  number = jnp.arange(page_count(total, kv_heads, page), dtype=jnp.int32)
  ended = ends[:, None] <= number[None, :, None]
  heads = jnp.sum(ended.astype(jnp.int32), axis=-1)
  used = heads < kv_heads
  heads = jnp.where(used, heads, 0)

  first = jnp.take_along_axis(ends - needed, heads, axis=1)
  inside = jnp.arange(page, dtype=jnp.int32)[None, None]
  place = ((number[None] - first) * page)[..., None] + inside
  flat = heads[..., None] * most + jnp.minimum(place, most - 1)
  chosen = jnp.take_along_axis(
    slots.reshape(batch, -1), flat.reshape(batch, -1), axis=1
  ).reshape(flat.shape)
  filled = used[..., None] & (place < most)
  return jnp.where(used, heads, -1), jnp.where(filled, chosen, -1)
