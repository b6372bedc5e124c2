"""Layers whose heads share the pages of one pool."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.activations import Activations
from kvjax.cache.base import AXES, Arrange, Index, Layer, host_copy
from kvjax.cache.layers import Slots
from kvjax.cache.packed import PackedLayer, Pages, page_devices
from kvjax.cache.tailed import TailedLayer
from kvjax.kernels.dispatch import on_mesh
from kvjax.kernels.paged_attention import Span, Window
from kvjax.struct import replace, static, struct


@struct
class PooledLayers(TailedLayer):
  """A stack of layers, each with as many pages as its heads need.

  The memory is proportional to the tokens that all layers keep together,
  however unevenly, and its shapes depend on that total alone. The pages of a
  row are those of layer 0, then those of layer 1, and so on, then unused ones.
  They are one array, whose axis of layers has size 1. It is always a stack:
  `at` returns a layer as a `PackedLayer`, with its pages copied out.

  On a mesh each device has a pool of its own, for its pages of every layer: a
  row has `devices` equal parts, one each.

  Attributes:
    pages: the pool; `heads` has KV head + K x layer for each page, -1 for an
      unused one.
    tail: tokens appended since, in the same slots for all heads of a layer.
    most: the maximum number of pages of a layer in a row, on a device.
    devices: n, the number of devices that pages were shared out over.
  """

  separable = False

  pages: Pages
  tail: Slots
  most: int = static()
  devices: int = static(default=1)

  @classmethod
  def empty(cls, packed: PackedLayer, pages: int) -> "PooledLayers":
    """Makes a layer's part of an empty pool; `place` joins those of a stack.

    Args:
      packed: a layer of the pool, with the most pages that one may have.
      pages: pages of the pool per layer.
    """

    def resize(x: Array) -> Array:
      return jnp.zeros((x.shape[0], pages, *x.shape[2:]), x.dtype)

    pool = jax.tree.map(resize, packed.pages)
    devices = page_devices()
    most = packed.pages.heads.shape[1] // devices
    return cls(pool, packed.tail, most, devices).clear()

  @property
  def lengths(self) -> Int[Array, "L B K"]:
    """Number of tokens per layer, row and KV head."""
    layers, batch, kv_heads, _ = self.tail.positions.shape
    pages = self._rows
    valid = jnp.sum(pages.positions >= 0, axis=-1, dtype=jnp.int32)
    # Beyond the last head, where nothing is counted.
    owners = jnp.where(pages.heads >= 0, pages.heads, layers * kv_heads)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    counts = jnp.zeros((batch, layers * kv_heads), jnp.int32)
    counts = counts.at[rows, owners].add(valid, mode="drop")
    by_layer = counts.reshape(batch, layers, kv_heads)
    return jnp.moveaxis(by_layer, 1, 0) + self.tail.lengths

  def write(self, index: Int[Array, ""], packed: PackedLayer) -> "PooledLayers":
    """Writes a layer after those before it; layers come in order."""
    owned = packed.pages.heads + index * self.tail.positions.shape[2]
    # Unused pages stay unused.
    owned = jnp.where(packed.pages.heads >= 0, owned, -1)
    tail = jax.tree.map(
      lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, 0),
      self.tail,
      packed.tail,
    )
    write = functools.partial(_write, self._span.part)
    operands = (self.pages, replace(packed.pages, heads=owned))
    pages = on_mesh(write, operands, ("LBR", "BR"), "LBR")
    return replace(self, pages=pages, tail=tail)

  def at(self, index: Index | int) -> Any:
    """Returns one layer, as a `PackedLayer`."""

    def take(pages: Pages) -> Pages:
      window = Window.of(pages.heads, self._span)
      return window.take(pages) if window else pages

    pages = on_mesh(take, (self._pages_of(index),), ("BR",), "BR")
    return PackedLayer(pages, self.tail.at(index))

  @property
  def _span(self) -> Span:
    """Where the pages of a layer are."""
    return Span(self.pages.heads.shape[2] // self.devices, self.most)

  @property
  def _rows(self) -> Pages:
    """The pool without its axis of layers."""
    rows: Pages = jax.tree.map(lambda x: x.reshape(x.shape[1:]), self.pages)
    return rows

  def _pages_of(self, index: Index | int) -> Pages:
    """The pool, in which the pages of one layer alone have heads."""
    assert index is not None
    pages, kv_heads = self._rows, self.tail.positions.shape[2]
    heads = pages.heads - jnp.asarray(index, jnp.int32) * kv_heads
    own = (heads >= 0) & (heads < kv_heads)
    return replace(pages, heads=jnp.where(own, heads, -1))

  def attend(
    self, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], "PooledLayers"]:
    """Fails, as a block attends to one layer; see `step`."""
    raise NotImplementedError("A block attends to one layer of a pool.")

  def step(
    self, activations: Activations, index: Index, arrange: Arrange | None = None
  ) -> tuple[Float[Array, "B N S Dv"], "PooledLayers"]:
    """Appends a block to a layer and attends to it, in the pool."""
    assert arrange is None
    stack = self.append(activations, index)
    layer = PackedLayer(stack._pages_of(index), stack.tail.at(index))
    return layer.attend_within(activations, self._span), stack

  def map_slots(self, change: Callable[[Any], Any]) -> "PooledLayers":
    """Changes every part that has keys, values and positions."""
    tail = self.tail.map_slots(change)
    return replace(self, pages=change(self.pages), tail=tail)

  def clear(self) -> "PooledLayers":
    """Empties all slots and frees all pages."""
    cleared = super().clear()
    heads = jnp.full_like(self.pages.heads, -1)
    return replace(cleared, pages=replace(cleared.pages, heads=heads))

  def grown_like(self, other: Layer) -> "PooledLayers":
    """Grows to the pool and the tail of another one."""
    assert isinstance(other, PooledLayers)
    grown = replace(self, tail=self.tail.grown_like(other.tail))
    if self.devices != other.devices:
      return grown
    extra = max(other._span.part - self._span.part, 0)
    pages = self.pages.grow(extra, self.devices)
    # The larger pool need not have the larger layers.
    return replace(grown, pages=pages, most=max(self.most, other.most))

  def place(
    self, place_tree: Callable[[Any, Sequence[str]], Any]
  ) -> "PooledLayers":
    """Places the arrays on a mesh, pages in the place of heads.

    A new pool, and that of an older file, has pages for each layer, of which a
    device fills all that it has in turn. They are joined first.
    """

    def join(x: Shaped[Array, "L B R *P"]) -> Shaped[Array, "1 B S *P"]:
      parts = x.reshape(*x.shape[:2], self.devices, -1, *x.shape[3:])
      return jnp.moveaxis(parts, 0, 2).reshape(1, x.shape[1], -1, *x.shape[3:])

    pages = self.pages
    if len(pages.heads) > 1:
      pages = jax.tree.map(join, pages)
    pages = place_tree(pages, AXES)
    return replace(self, pages=pages, tail=self.tail.place(place_tree))

  def row_positions(
    self, row: int, index: int | None = None
  ) -> list[list[int]]:
    """Positions of the tokens of a row of a layer, per KV head."""
    assert index is not None
    positions = self.tail.row_positions(row, index)
    kv_heads = len(positions)
    pages = host_copy(self.pages.positions, 0)[row]
    heads = host_copy(self.pages.heads, 0)[row]
    for owner, page in zip(heads, pages, strict=True):
      layer, head = divmod(int(owner), kv_heads)
      if layer == index:
        positions[head] += [int(p) for p in page if p >= 0]
    return positions


def _write(part: int, pool: Pages, pages: Pages) -> Pages:
  """Writes a layer's pages after those that the pools already have.

  Args:
    part: pages of a row's pool on a device.
    pool: the pools of some devices, or of one.
    pages: those of the layer on the same devices, used ones first on each.
  """
  batch, total = pool.heads.shape[1:]
  used = pool.heads.reshape(batch, -1, part) >= 0
  free = jnp.sum(used, axis=2, dtype=jnp.int32)
  free += jnp.arange(0, total, part, dtype=jnp.int32)[None]
  owners = pages.heads.reshape(batch, free.shape[1], -1)
  number = jnp.arange(owners.shape[2], dtype=jnp.int32)[None, None]
  # Unused pages go beyond the pool, where they are dropped.
  place = jnp.where(owners >= 0, free[..., None] + number, total)
  rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
  where = 0, rows, place.reshape(batch, -1)
  return jax.tree.map(lambda x, y: x.at[where].set(y, mode="drop"), pool, pages)
