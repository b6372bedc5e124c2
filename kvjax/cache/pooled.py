"""Layers whose heads share the pages of one pool."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.base import AXES, Arrange, Index
from kvjax.cache.layers import Slots
from kvjax.cache.packed import PackedLayer, Pages
from kvjax.cache.tailed import TailedLayer
from kvjax.struct import replace, static, struct


@struct
class PooledLayers(TailedLayer):
  """A stack of layers, each with as many pages as its heads need.

  The memory is proportional to the tokens that all layers keep together,
  however unevenly, and its shapes depend on that total alone. The pages of a
  row are those of layer 0, then those of layer 1, and so on. They fill the
  first slab, which is the first part along the leading axis, then the second;
  so a layer's pages need not be in the slab of its index. It is always a stack:
  `at` returns a layer as a `PackedLayer`, with its pages copied out.

  Attributes:
    pages: the pool; `heads` has KV head + K x layer for each page, -1 for an
      unused one.
    tail: tokens appended since, in the same slots for all heads of a layer.
    most: the maximum number of pages of a layer in a row.
  """

  separable = False

  pages: Pages
  tail: Slots
  most: int = static()

  @classmethod
  def empty(cls, packed: PackedLayer, pages: int) -> "PooledLayers":
    """Makes a layer's part of an empty pool.

    Args:
      packed: a layer of the pool, with the most pages that one may have.
      pages: pages of the pool per layer.
    """

    def resize(x: Array) -> Array:
      return jnp.zeros((x.shape[0], pages, *x.shape[2:]), x.dtype)

    pool = jax.tree.map(resize, packed.pages)
    return cls(pool, packed.tail, packed.pages.heads.shape[1]).clear()

  @property
  def lengths(self) -> Int[Array, "L B K"]:
    """Number of tokens per layer, row and KV head."""
    layers, batch, kv_heads, _ = self.tail.positions.shape
    valid = jnp.sum((self.pages.positions >= 0).astype(jnp.int32), axis=-1)
    owners = self.pages.heads
    # Beyond the last head, where nothing is counted.
    owners = jnp.where(owners >= 0, owners, layers * kv_heads)
    rows = jnp.arange(batch)[None, :, None]
    counts = jnp.zeros((batch, layers * kv_heads), jnp.int32)
    counts = counts.at[rows, owners].add(valid, mode="drop")
    by_layer = counts.reshape(batch, layers, kv_heads)
    return jnp.moveaxis(by_layer, 1, 0) + self.tail.lengths

  def write(self, index: Int[Array, ""], packed: PackedLayer) -> "PooledLayers":
    """Writes a layer after those before it; layers come in order."""
    slabs, batch, slab = self.pages.heads.shape
    heads = packed.pages.heads
    used = jnp.sum((self.pages.heads >= 0).astype(jnp.int32), axis=(0, 2))
    place = used[:, None] + jnp.arange(heads.shape[1], dtype=jnp.int32)[None]
    # Unused pages go beyond the pool, where they are dropped.
    place = jnp.where(heads >= 0, place, slabs * slab)
    where = (place // slab, jnp.arange(batch)[:, None], place % slab)
    owned = heads + index * self.tail.positions.shape[2]
    tail = jax.tree.map(
      lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, 0),
      self.tail,
      packed.tail,
    )
    pages = jax.tree.map(
      lambda x, y: x.at[where].set(y, mode="drop"),
      self.pages,
      replace(packed.pages, heads=owned),
    )
    return replace(self, pages=pages, tail=tail)

  def at(self, index: Index | int) -> Any:
    """Returns one layer, as a `PackedLayer`."""
    assert index is not None
    _, batch, slab = self.pages.heads.shape
    kv_heads = self.tail.positions.shape[2]
    first = jnp.asarray(index, jnp.int32) * kv_heads
    owners = self.pages.heads
    before = (owners >= 0) & (owners < first)
    start = jnp.sum(before.astype(jnp.int32), axis=(0, 2))
    place = start[:, None] + jnp.arange(self.most, dtype=jnp.int32)[None]
    place = jnp.minimum(place, owners.shape[0] * slab - 1)
    where = (place // slab, jnp.arange(batch)[:, None], place % slab)
    pages: Pages = jax.tree.map(lambda x: x[where], self.pages)
    own = (pages.heads >= first) & (pages.heads < first + kv_heads)
    # At the end of the pool, the last page stands in for those that follow.
    own &= jnp.diff(place, axis=1, prepend=-1) > 0
    heads = jnp.where(own, pages.heads - first, -1)
    return PackedLayer(replace(pages, heads=heads), self.tail.at(index))

  def attend(
    self, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], "PooledLayers"]:
    """Fails, as a block attends to one layer; see `step`."""
    raise NotImplementedError("A block attends to one layer of a pool.")

  def step(
    self,
    index: Index,
    activations: Activations,
    arrange: Arrange | None = None,
  ) -> tuple[Float[Array, "B N S Dv"], "PooledLayers"]:
    """Appends a block to a layer and attends to it."""
    assert arrange is None
    stack = self.append(activations, index)
    return stack.at(index).attend(activations)[0], stack

  def map_slots(self, change: Callable[[Any], Any]) -> "PooledLayers":
    """Changes every part that has keys, values and positions."""
    tail = self.tail.map_slots(change)
    return replace(self, pages=change(self.pages), tail=tail)

  def clear(self) -> "PooledLayers":
    """Empties all slots and frees all pages."""
    cleared = super().clear()
    heads = jnp.full_like(self.pages.heads, -1)
    return replace(cleared, pages=replace(cleared.pages, heads=heads))

  def place(
    self, place_tree: Callable[[Any, Sequence[str]], Any]
  ) -> "PooledLayers":
    """Places the arrays on a mesh; a layer may have any pages of the pool."""
    pages = place_tree(self.pages, AXES[:1])
    return replace(self, pages=pages, tail=self.tail.place(place_tree))

  def row_positions(
    self, row: int, index: int | None = None
  ) -> list[list[int]]:
    """Positions of the tokens of a row of a layer, per KV head."""
    assert index is not None
    positions = self.tail.row_positions(row, index)
    kv_heads = len(positions)
    pages = np.asarray(self.pages.positions)[:, row]
    for owner, page in zip(
      np.asarray(self.pages.heads)[:, row].ravel(),
      pages.reshape(-1, pages.shape[-1]),
      strict=True,
    ):
      layer, head = divmod(int(owner), kv_heads)
      if layer == index:
        positions[head] += [int(p) for p in page if p >= 0]
    return positions
