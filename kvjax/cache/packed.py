"""A layer's cache whose KV heads have different numbers of tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.activations import Activations
from kvjax.cache.base import AXES, Arrange, Index, Layer, host_copy
from kvjax.cache.layers import KV_DTYPES, LayerCache, Slots
from kvjax.cache.tailed import TailedLayer
from kvjax.kernels.gather import compact
from kvjax.kernels.mesh_axes import CONTEXT, MODEL, axis_size, whole
from kvjax.kernels.paged_attention import Span, paged_attention
from kvjax.kernels.quantized import Quantized, quantize
from kvjax.struct import replace, struct

# Slots per page. Up to P - 1 slots per head stay empty. With smaller pages,
# `paged_attention` processes a question in more passes.
PAGE = 32


@struct
class Pages:
  """Keys and values in R pages of P slots per row, each page of one KV head.

  A row has the pages of head 0, then those of head 1, and so on, then unused
  pages. A head's tokens fill its pages in the order of their positions; only
  its last page has empty slots. R is the same for all rows. On a mesh, B is
  sharded over "data", and R over all other axes: the n devices along them take
  turns, so that each one has an n-th of the used pages, in their order. Where
  heads have equally many slots, each device has pages of its heads, of which
  several may be empty.

  Attributes:
    keys: rotated keys; arbitrary in empty slots and unused pages.
    values: values; arbitrary where the keys are.
    positions: position of each token in its uncompressed row; -1 for empty.
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
    """Gathers slots into pages, as `PackedLayer.of` describes them."""
    heads, chosen = _layout(slots, total, page)
    batch, kv_heads, capacity, _ = cache.keys.shape
    # The heads of a row, concatenated, are treated as one long head.
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

  @classmethod
  def even(cls, cache: LayerCache, page: int) -> "Pages":
    """Cuts slots into pages where they are, as `PackedLayer.even` says."""
    sizes = jax.sharding.get_abstract_mesh().shape
    kv_heads = cache.positions.shape[1]
    context, model = sizes.get(CONTEXT, 1), sizes.get(MODEL, 1)
    # Heads that no device has alone are whole on all.
    parts = model if kv_heads % model == 0 else 1
    rest = axis_size(whole(MODEL, sizes), sizes) // parts // context
    per_head = -(-cache.capacity // (page * context * rest)) * context * rest
    cache = cache.grow(per_head * page - cache.capacity)

    def cut(x: Shaped[Array, "B K T *D"]) -> Shaped[Array, "B R P *D"]:
      split = (parts, kv_heads // parts, context, rest, -1, page)
      x = x.reshape(x.shape[0], *split, *x.shape[3:])
      # Pages of any heads are in the order of the devices that have them.
      x = jnp.moveaxis(x, (4, 3), (2, 3))
      return x.reshape(x.shape[0], -1, *x.shape[6:])

    heads = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    heads = cut(jnp.broadcast_to(heads, cache.positions.shape))[..., 0]
    return cls(cut(cache.keys), cut(cache.values), cut(cache.positions), heads)

  def grow(self, extra: int, devices: int) -> "Pages":
    """Adds `extra` unused pages per device to each row."""

    def pad(x: Array, axis: int, fill: int = 0) -> Array:
      axis += x.ndim
      # Each device has a part of the pages.
      parts = (*x.shape[:axis], devices, -1, *x.shape[axis + 1 :])
      padding = [(0, 0)] * (x.ndim + 1)
      padding[axis + 1] = (0, extra)
      padded = jnp.pad(x.reshape(parts), padding, constant_values=fill)
      return padded.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    keys, values = jax.tree.map(lambda x: pad(x, -3), (self.keys, self.values))
    positions, heads = pad(self.positions, -2, -1), pad(self.heads, -1, -1)
    return replace(
      self, keys=keys, values=values, positions=positions, heads=heads
    )

  def lengths(self, kv_heads: int) -> Int[Array, "*L B K"]:
    """Number of tokens per row and KV head."""
    valid = jnp.sum(self.positions >= 0, axis=-1, dtype=jnp.int32)
    heads = jnp.arange(kv_heads, dtype=jnp.int32).reshape(
      (1,) * self.heads.ndim + (-1,)
    )
    owns = self.heads[..., None] == heads
    return jnp.sum(jnp.where(owns, valid[..., None], 0), axis=-2)


@struct
class PackedLayer(TailedLayer):
  """The kept tokens of a layer in pages, and the tokens appended since.

  The memory of the pages is proportional to the number of tokens that all heads
  keep together, not to the largest head.

  Attributes:
    pages: tokens that were kept.
    tail: tokens appended since, in the same slots for all heads.
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
    """Packs the given slots of a cache; the tail has no room yet.

    Args:
      cache: the cache.
      slots: slots of each head, ascending, then -1.
      total: maximum number of slots of a row over all its heads.
      page: P, slots per page.
    """
    # Ragged budgets are spread once, so no later eviction needs a memory.
    empty = cache.without_memory().shrink(0)
    return cls(Pages.of(cache, slots, total, page), empty)

  @classmethod
  def even(cls, cache: LayerCache, page: int = PAGE) -> "PackedLayer":
    """Makes pages of heads with equally many slots; the tail has no room yet.

    On a mesh, devices that have different tokens of a head, or the same heads,
    then have pages of their own. Tokens stay on their devices if the page and
    the devices divide them.

    Args:
      cache: the cache, with the tokens of each head in its first slots.
      page: P, slots per page.
    """
    cache = cache.without_memory()
    return cls(Pages.even(cache, page), cache.shrink(0))

  @property
  def lengths(self) -> Int[Array, "*L B K"]:
    """Number of tokens per row and KV head."""
    kept = self.pages.lengths(self.tail.positions.shape[-2])
    return kept + self.tail.lengths

  def grown_like(self, other: Layer) -> "PackedLayer":
    """Grows to the pages and the tail of another layer of its kind."""
    assert isinstance(other, PackedLayer)
    devices = page_devices()
    sizes = [layer.pages.heads.shape[-1] for layer in (self, other)]
    pages = self.pages
    # Pages that were saved under another mesh may not be shared out alike.
    if sizes[0] < sizes[1] and not any(size % devices for size in sizes):
      pages = pages.grow((sizes[1] - sizes[0]) // devices, devices)
    return replace(self, pages=pages, tail=self.tail.grown_like(other.tail))

  def place(
    self, place_tree: Callable[[Any, Sequence[str]], Any]
  ) -> "PackedLayer":
    """Places the arrays on a mesh, pages in the place of heads."""
    pages = place_tree(self.pages, AXES)
    return replace(self, pages=pages, tail=self.tail.place(place_tree))

  def map_slots(self, change: Callable[[Any], Any]) -> "PackedLayer":
    """Changes every part that has keys, values and positions."""
    tail = self.tail.map_slots(change)
    return replace(self, pages=change(self.pages), tail=tail)

  def row_positions(
    self, row: int, index: int | None = None
  ) -> list[list[int]]:
    """Positions of the tokens of a row, per KV head; on the host."""
    positions = self.tail.row_positions(row, index)
    pages = host_copy(self.pages.positions, index)[row]
    heads = host_copy(self.pages.heads, index)[row]
    for page, head in zip(pages, heads, strict=True):
      if head >= 0:
        positions[head] += [int(p) for p in page if p >= 0]
    return positions

  def quantize(self, kv_dtype: str) -> "PackedLayer":
    """Quantizes keys and values to eight bits."""
    pages, dtype = self.pages, KV_DTYPES[kv_dtype]
    assert not isinstance(pages.keys, Quantized)
    assert not isinstance(pages.values, Quantized)
    keys, values = quantize(pages.keys, dtype), quantize(pages.values, dtype)
    tail = self.tail.quantize(kv_dtype)
    return PackedLayer(replace(pages, keys=keys, values=values), tail)

  def attend(
    self, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], "PackedLayer"]:
    """Attends to the pages and the tail."""
    return self.attend_within(activations, None), self

  def attend_within(
    self, activations: Activations, span: Span | None
  ) -> Float[Array, "B N S Dv"]:
    """Attends to the pages, those with a head being in `span`, and the tail."""
    return self._attend(activations, self.pages, None, span)

  def step(
    self, activations: Activations, index: Index, arrange: Arrange | None = None
  ) -> tuple[Float[Array, "B N S Dv"], "PackedLayer"]:
    """Appends a block and attends; keys are never rerotated here."""
    assert arrange is None
    stack = self.append(activations, index)
    # Pages are read in place: slicing a layer would copy them out of the stack.
    empty = replace(stack.pages, keys=None, values=None)
    layer = replace(stack, pages=empty).at(index)
    pages = replace(
      layer.pages, keys=stack.pages.keys, values=stack.pages.values
    )
    return layer._attend(activations, pages, index), stack

  def _attend(
    self,
    activations: Activations,
    pages: Pages,
    layer: Index,
    span: Span | None = None,
  ) -> Float[Array, "B N S Dv"]:
    """Attends to pages, which may be those of a stack, and to the tail."""
    partial = paged_attention(
      activations.queries,
      pages.keys,
      pages.values,
      activations.positions,
      pages.positions,
      pages.heads,
      self.tail.positions.shape[1],
      options=activations.attention,
      layer=layer,
      span=span,
    )
    return self._attend_with_tail(activations, partial)


def page_count(total: int, kv_heads: int, page: int) -> int:
  """R, the number of pages that `total` tokens need at most.

  The n_j tokens of head j take ceil(n_j / P) <= (n_j + P - 1) / P pages. The
  mesh in context has as many of them on each device.
  """
  devices = page_devices()
  return -(-most_pages(total, kv_heads, page) // devices) * devices


def most_pages(total: int, kv_heads: int, page: int) -> int:
  """The number of pages that `total` tokens need at most, on one device."""
  return (total + kv_heads * (page - 1)) // page


def page_devices() -> int:
  """The number of devices that the mesh in context shares pages out over."""
  mesh = jax.sharding.get_abstract_mesh().shape
  return axis_size(whole(MODEL, mesh), mesh)


def _layout(
  slots: Int[Array, "B K M"], total: int, page: int
) -> tuple[Int[Array, "B R"], Int[Array, "B R P"]]:
  """Assigns a head and its slots to every page; -1 for none."""
  batch, kv_heads, length = slots.shape
  counts = jnp.sum(slots >= 0, axis=-1, dtype=jnp.int32)
  needed = (counts + page - 1) // page
  ends = jnp.cumsum(needed, axis=-1)
  count = page_count(total, kv_heads, page)
  # Device d of n, which has the d-th part of the array, has every n-th page.
  number = jnp.arange(count, dtype=jnp.int32)
  number = number.reshape(-1, page_devices()).T.ravel()
  ended = ends[:, None] <= number[None, :, None]
  # Page r is of the first head whose pages end after r, so heads without
  # tokens get none. Past the last head, this is K.
  heads = jnp.sum(ended, axis=-1, dtype=jnp.int32)
  used = heads < kv_heads
  heads = jnp.where(used, heads, 0)

  first = jnp.take_along_axis(ends - needed, heads, axis=1)
  inside = jnp.arange(page, dtype=jnp.int32)[None, None]
  # The rank of each place of a page among the tokens of its head. A head's
  # list ends in -1, which also fills up its last page.
  place = ((number[None] - first) * page)[..., None] + inside
  flat = heads[..., None] * length + jnp.minimum(place, length - 1)
  chosen = jnp.take_along_axis(
    slots.reshape(batch, -1), flat.reshape(batch, -1), axis=1
  ).reshape(flat.shape)
  filled = used[..., None] & (place < length)
  return jnp.where(used, heads, -1), jnp.where(filled, chosen, -1)
