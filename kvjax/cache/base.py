"""The interface of a layer's cache."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.hosts import read
from kvjax.kernels.layouts import row_major
from kvjax.kernels.mesh_axes import AXES as AXES
from kvjax.struct import replace, tree_bytes

# An index into the leading axis of a stack; None where there is no such axis.
Index = Int[Array, ""] | None
# Maps a layer to what attention reads in its place: rerotated keys, say.
Arrange = Callable[[Any], Any]


class LayerSizes(NamedTuple):
  """What a layer of a cache and one of a model have in common.

  Attributes:
    kv_heads: K.
    key_width: D.
    value_width: Dv.
    window: tokens of a sliding window; None without one.
  """

  kv_heads: int
  key_width: int
  value_width: int
  window: int | None = None


class Layer(abc.ABC):
  """Base class of the cache of one layer.

  A layer is a pytree. Layers of one kind are joined to a stack: the same class
  with an additional leading axis of every leaf. The engine addresses a layer of
  a stack by its index and writes appended tokens in place, whatever the number
  of layers.

  `kvjax.cache.layers.Slots` has the same number of slots for every head,
  `kvjax.cache.packed.PackedLayer` as many as each head needs,
  `kvjax.cache.pooled.PooledLayers` as many as each layer and head needs,
  `kvjax.cache.narrow.NarrowLayer` stores some channels of the keys it kept,
  `kvjax.cache.sparse.SparseLayer` reads only some of its slots, and
  `kvjax.cache.window.WindowLayer` is the ring of a sliding-window layer.
  """

  # Whether methods may evict from its slots.
  compressible: ClassVar[bool] = False
  # Whether slices of a stack along its leading axis are its layers.
  separable: ClassVar[bool] = True

  @property
  @abc.abstractmethod
  def capacity(self) -> int | None:
    """Number of slots for appended tokens, filled or not; None for no limit."""

  @property
  def fixed_slots(self) -> int:
    """Slots of the capacity that are apart from those that `grow` adds."""
    return 0

  @property
  @abc.abstractmethod
  def sizes(self) -> LayerSizes:
    """Heads and widths of a layer, whatever it stores of them."""

  @property
  @abc.abstractmethod
  def next_slot(self) -> Int[Array, "*L"]:
    """The next slot to write."""

  @property
  @abc.abstractmethod
  def lengths(self) -> Int[Array, "*L B K"]:
    """Number of tokens per row and KV head."""

  @property
  def num_attended(self) -> Int[Array, "*L B K"]:
    """Number of tokens that the next token attends to."""
    return self.lengths

  @property
  def nbytes(self) -> int:
    """Allocated bytes."""
    return tree_bytes(self)

  @abc.abstractmethod
  def grow(self, extra: int) -> Self:
    """Adds `extra` empty slots for appended tokens."""

  def grown_like(self, other: "Layer") -> Self:
    """Grows to the sizes of another layer of its kind, where these are larger.

    What cannot grow stays as it is.
    """
    if self.capacity is None or other.capacity is None:
      return self
    extra = other.capacity - self.capacity
    return self.grow(extra) if extra > 0 else self

  @abc.abstractmethod
  def append(self, activations: Activations, index: Index = None) -> Self:
    """Appends a block; there must be room for it."""

  @abc.abstractmethod
  def attend(
    self, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], Self]:
    """Computes the attention of a block, causal by positions.

    The layer already contains the block's keys and values.

    Returns:
      The attention output, and the layer after it.
    """

  def step(
    self, activations: Activations, index: Index, arrange: Arrange | None = None
  ) -> tuple[Float[Array, "B N S Dv"], Self]:
    """Appends a block to a layer of a stack and attends to the layer.

    Args:
      activations: activations of the block.
      index: index of the layer in the stack.
      arrange: maps the layer to what attention reads in its place.

    Returns:
      The attention output, and the stack.
    """
    stack = self.append(activations, index)
    layer = stack.at(index)
    if arrange is not None:
      # The arranged keys are read only: what is stored stays as it was written.
      return arrange(layer).attend(activations)[0], stack
    output, updated = layer.attend(activations)
    return output, stack.put(index, layer, updated)

  def place(self, place_tree: Callable[[Any, Sequence[str]], Any]) -> Self:
    """Places the arrays of the layer on a mesh.

    Args:
      place_tree: places a tree, given the mesh axes of its leading axes.
    """
    layer: Self = place_tree(self, AXES)
    return layer

  def quantize(self, kv_dtype: str) -> "Layer":
    """Quantizes keys and values to eight bits, also those appended later.

    Called once no method evicts from the layer any more.

    Args:
      kv_dtype: one of `kvjax.cache.layers.KV_DTYPES`.
    """
    raise NotImplementedError(f"{type(self).__name__} cannot be quantized.")

  @abc.abstractmethod
  def map_slots(self, change: Callable[[Any], Any]) -> Self:
    """Changes every part of the layer with keys, values and positions.

    Args:
      change: maps a part with these fields to its replacement.
    """

  @abc.abstractmethod
  def row_positions(
    self, row: int, index: int | None = None
  ) -> list[list[int]]:
    """Positions of the tokens of a row, per KV head; on the host.

    Args:
      row: the row.
      index: the layer, if this is a stack.
    """

  def clear(self) -> Self:
    """Empties all slots."""
    return self.map_slots(
      lambda part: replace(part, positions=jnp.full_like(part.positions, -1))
    )

  def offload(self) -> Self:
    """Moves to the host what is meant to live there; by default nothing."""
    return self

  def at(self, index: Index | int) -> Self:
    """Returns one layer of a stack."""
    if index is None:
      return self
    take = jax.lax.dynamic_index_in_dim

    def select(x: Array) -> Array:
      # Host arrays cannot be sliced by a computation, but can be reshaped.
      if x.shape[0] == 1:
        return x.reshape(x.shape[1:])
      return x[index] if isinstance(index, int) else take(x, index, 0, False)

    layer: Self = jax.tree.map(select, self)
    return layer

  def put(self, index: Index, old: Self, new: Self) -> Self:
    """Replaces a layer of a stack; unchanged arrays are not written."""
    if index is None:
      return new

    def write(x: Array, a: Array, b: Array) -> Array:
      # `attend` returns the very arrays that it does not change.
      if a is b:
        return x
      update = jax.lax.dynamic_update_index_in_dim
      return update(x, row_major(b.astype(x.dtype)), index, 0)

    stack: Self = jax.tree.map(write, self, old, new)
    return stack


def host_copy(
  x: Int[Array, "..."], index: int | None
) -> Int[np.ndarray, "..."]:
  """Copies an array to the host; of a stack's array, only the given layer."""
  host = read(x)
  return host if index is None else host[index]
