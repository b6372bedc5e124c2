"""Layers whose heads share the pages of one pool."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.cache.base import AXES, Arrange, Index, Layer, host_copy
from kvjax.cache.layers import Slots
from kvjax.cache.packed import PackedLayer, Pages, page_devices
from kvjax.cache.tailed import TailedLayer
from kvjax.kernels.dispatch import on_mesh
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

  On a mesh each device has a pool of its own, for its pages of every layer:
  slabs have `devices` equal parts, one each.

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
    """Makes a layer's part of an empty pool.

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
    valid = jnp.sum(self.pages.positions >= 0, axis=-1, dtype=jnp.int32)
    owners = self.pages.heads
    # Beyond the last head, where nothing is counted.
    owners = jnp.where(owners >= 0, owners, layers * kv_heads)
    rows = jnp.arange(batch, dtype=jnp.int32)[None, :, None]
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
    write = functools.partial(_write, self._part)
    packed_pages = replace(packed.pages, heads=owned)
    operands = (self.pages, packed_pages)
    pages = self._on_devices(write, operands, ("LBR", "BR"), "LBR")
    return replace(self, pages=pages, tail=tail)

  def at(self, index: Index | int) -> Any:
    """Returns one layer, as a `PackedLayer`."""
    assert index is not None
    kv_heads = self.tail.positions.shape[2]
    first = jnp.asarray(index, jnp.int32) * kv_heads
    take = functools.partial(_take, self._part, kv_heads, self.most)
    operands = (self.pages, first)
    pages = self._on_devices(take, operands, ("LBR", ""), "BR")
    return PackedLayer(pages, self.tail.at(index))

  @property
  def _part(self) -> int:
    """Pages of a slab that are of one device."""
    return self.pages.heads.shape[2] // self.devices

  def _on_devices(
    self,
    change: Callable[..., Pages],
    operands: Sequence[Any],
    spread: Sequence[str],
    result: str,
  ) -> Pages:
    """Changes the pool of each device there, where the mesh has these devices.

    A pool that was saved under another mesh is changed as a whole.
    """
    if self.devices % page_devices():
      return change(*operands)
    pages: Pages = on_mesh(change, operands, spread, result)
    return pages

  def attend(
    self, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], "PooledLayers"]:
    """Fails, as a block attends to one layer; see `step`."""
    raise NotImplementedError("A block attends to one layer of a pool.")

  def step(
    self, index: Index, activations: Activations, arrange: Arrange | None = None
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

  def grown_like(self, other: Layer) -> "PooledLayers":
    """Grows to the pool and the tail of another one."""
    assert isinstance(other, PooledLayers)
    tail, extra = self.tail.grown_like(other.tail), other._part - self._part
    if extra <= 0 or self.devices != other.devices:
      return replace(self, tail=tail)
    layers, devices = len(self.pages.heads), self.devices

    def to_rows(x: Array) -> Array:
      """Joins what a device has of all slabs, as it fills them in turn."""
      parts = x.reshape(*x.shape[:2], devices, -1, *x.shape[3:])
      joined = jnp.moveaxis(parts, 0, 2)
      return joined.reshape(x.shape[1], -1, *x.shape[3:])

    def to_slabs(x: Array) -> Array:
      parts = x.reshape(len(x), devices, layers, -1, *x.shape[2:])
      slabs = jnp.moveaxis(parts, 2, 0)
      return slabs.reshape(layers, len(x), -1, *x.shape[2:])

    rows: Pages = jax.tree.map(to_rows, self.pages)
    pages = jax.tree.map(to_slabs, rows.grow(layers * extra, devices))
    return PooledLayers(pages, tail, max(self.most, other.most), devices)

  def place(
    self, place_tree: Callable[[Any, Sequence[str]], Any]
  ) -> "PooledLayers":
    """Places the arrays on a mesh, pages in the place of heads."""
    pages = place_tree(self.pages, AXES)
    return replace(self, pages=pages, tail=self.tail.place(place_tree))

  def row_positions(
    self, row: int, index: int | None = None
  ) -> list[list[int]]:
    """Positions of the tokens of a row of a layer, per KV head."""
    assert index is not None
    positions = self.tail.row_positions(row, index)
    kv_heads = len(positions)
    pages = host_copy(self.pages.positions, None)[:, row]
    for owner, page in zip(
      host_copy(self.pages.heads, None)[:, row].ravel(),
      pages.reshape(-1, pages.shape[-1]),
      strict=True,
    ):
      layer, head = divmod(int(owner), kv_heads)
      if layer == index:
        positions[head] += [int(p) for p in page if p >= 0]
    return positions


def _write(part: int, pool: Pages, pages: Pages) -> Pages:
  """Writes a layer's pages after those that the pools already have.

  Args:
    part: pages of a slab that are of one device.
    pool: the pools of some devices, or of one.
    pages: those of the layer on the same devices, used ones first on each.
  """
  devices = pool.heads.shape[2] // part
  owners = pages.heads.reshape(len(pages.heads), devices, -1)
  number = jnp.arange(owners.shape[2], dtype=jnp.int32)[None, None]
  place = _first_place(pool.heads >= 0, part)[..., None] + number
  # Unused pages go beyond the pool, where they are dropped.
  place = jnp.where(owners >= 0, place, len(pool.heads) * part)
  where = _index(place, part)
  return jax.tree.map(lambda x, y: x.at[where].set(y, mode="drop"), pool, pages)


def _take(
  part: int, kv_heads: int, most: int, pool: Pages, first: Int[Array, ""]
) -> Pages:
  """Takes the pages of a layer, whose heads count from `first` in the pool."""
  before = (pool.heads >= 0) & (pool.heads < first)
  number = jnp.arange(most, dtype=jnp.int32)[None, None]
  place = _first_place(before, part)[..., None] + number
  place = jnp.minimum(place, len(pool.heads) * part - 1)
  # At the end of a pool, the last page stands in for those that follow.
  distinct = jnp.diff(place, axis=2, prepend=-1) > 0
  where = _index(place, part)
  pages: Pages = jax.tree.map(lambda x: x[where], pool)
  own = (pages.heads >= first) & (pages.heads < first + kv_heads)
  own &= distinct.reshape(own.shape)
  return replace(pages, heads=jnp.where(own, pages.heads - first, -1))


def _first_place(before: Bool[Array, "L B R"], part: int) -> Int[Array, "B n"]:
  """Counts the pages of each device's pool that come before others."""
  slabs, batch, _ = before.shape
  by_device = before.astype(jnp.int32).reshape(slabs, batch, -1, part)
  return jnp.sum(by_device, axis=(0, 3))


def _index(
  place: Int[Array, "B n M"], part: int
) -> tuple[Int[Array, "B nM"], ...]:
  """Finds places of each device's pool in the axes of slabs, rows and pages."""
  batch, devices, _ = place.shape
  device = jnp.arange(devices, dtype=jnp.int32)[None, :, None]
  # Beyond the last slab, where nothing is written, whatever the page.
  page = device * part + place % part
  flat = (batch, -1)
  row = jnp.arange(batch, dtype=jnp.int32)[:, None]
  return (place // part).reshape(flat), row, page.reshape(flat)
