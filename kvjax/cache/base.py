"""What the engine asks of a layer's cache."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.struct import tree_bytes, updated

# An index into the leading axis of a stack; None where there is no such axis.
Index = Int[Array, ""] | None
# The axes of a mesh that rows and KV heads are spread over.
AXES = ("data", "model")
# What attention reads in place of a layer: keys turned elsewhere, say.
Arrange = Callable[[Any], Any]


class Layer(abc.ABC):
  """What the engine asks of a layer's cache.

  A layer is a pytree. Layers of one kind are joined to a stack, the same class
  with one more axis in front of every leaf, in which the engine addresses a
  layer by its index: what it appends is written in place, whatever the number
  of layers.

  `Slots` are as many for every head, `kvjax.cache.packed.PackedLayer` has as
  many as each needs, `kvjax.cache.sparse.SparseLayer` reads only some of them,
  and `kvjax.cache.window.WindowLayer` is the ring of a local layer.
  """

  # Whether methods may choose among its slots.
  compressible: ClassVar[bool] = False

  @property
  @abc.abstractmethod
  def capacity(self) -> int | None:
    """Slots that `append` can reach, filled or not; None for no limit."""

  @property
  @abc.abstractmethod
  def next_slot(self) -> Int[Array, "*L"]:
    """The next of them to write."""

  @property
  @abc.abstractmethod
  def lengths(self) -> Int[Array, "*L B K"]:
    """Tokens held per row and KV head."""

  @property
  def reads(self) -> Int[Array, "*L B K"]:
    """Tokens that a token attends to, for a start."""
    return self.lengths

  @property
  def nbytes(self) -> int:
    """Bytes allocated."""
    return tree_bytes(self)

  @abc.abstractmethod
  def grown(self, extra: int) -> Self:
    """The same tokens with so many more slots to write."""

  @abc.abstractmethod
  def append(self, activations: Activations, index: Index = None) -> Self:
    """Writes a block at the cursor; there must be room for it."""

  @abc.abstractmethod
  def attend(
    self, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], Self]:
    """Attention of a block's queries, causal by positions; the layer then.

    The block's own keys and values are in the layer already.
    """

  def step(
    self,
    index: Index,
    activations: Activations,
    arrange: Arrange | None = None,
  ) -> tuple[Float[Array, "B N S Dv"], Self]:
    """Appends a block to a layer of a stack, and attends to both.

    Args:
      index: of the layer.
      activations: the block.
      arrange: makes of the layer what attention reads.
    """
    stack = self.append(activations, index)
    layer = stack.at(index)
    if arrange is not None:
      return arrange(layer).attend(activations)[0], stack
    output, after = layer.attend(activations)
    return output, stack.put(index, layer, after)

  def placed(self, place: Callable[[Any, Sequence[str]], Any]) -> Self:
    """The layer with its arrays placed on a mesh.

    Args:
      place: given a tree and the mesh axes of its leading axes, places it.
    """
    layer: Self = place(self, AXES)
    return layer

  def quantized(self, kv_dtype: str) -> "Layer":
    """The same tokens in eight bits, once no method chooses among them.

    What is appended later is rounded too.

    Args:
      kv_dtype: one of `KV_DTYPES`.
    """
    raise NotImplementedError(f"{type(self).__name__} is not rounded.")

  @abc.abstractmethod
  def map_slots(self, change: Callable[[Any], Any]) -> Self:
    """The layer with every part changed that has keys, values and positions.

    Args:
      change: given a part with these fields, returns another.
    """

  @abc.abstractmethod
  def row_positions(self, row: int) -> list[list[int]]:
    """Positions of the tokens that a row holds, per KV head; on the host."""

  def cleared(self) -> Self:
    """As many slots, with nothing in them and nothing remembered."""
    return self.map_slots(
      lambda part: updated(part, positions=jnp.full_like(part.positions, -1))
    )

  def offloaded(self) -> Self:
    """The same tokens where they are to live: some may, with the host."""
    return self

  def at(self, index: Index | int) -> Self:
    """One layer of a stack."""
    if index is None:
      return self
    take = jax.lax.dynamic_index_in_dim

    def one(x: Array) -> Array:
      # What lives with the host takes no part in computations.
      if x.shape[0] == 1:
        return x.reshape(x.shape[1:])
      return x[index] if isinstance(index, int) else take(x, index, 0, False)

    layer: Self = jax.tree.map(one, self)
    return layer

  def put(self, index: Index, old: Self, new: Self) -> Self:
    """The stack with a layer replaced; what is the same is not written."""
    if index is None:
      return new

    def write(x: Array, a: Array, b: Array) -> Array:
      if a is b:
        return x
      update = jax.lax.dynamic_update_index_in_dim
      return update(x, b.astype(x.dtype), index, 0)

    stack: Self = jax.tree.map(write, self, old, new)
    return stack
