"""The index of a layer's retrieval method, changed in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from kvjax.kernels.layouts import row_major
from kvjax.kernels.stacks import (
  Layer,
  after,
  as_stack,
  index_stack,
  scatter_entries,
)
from kvjax.retrieval.base import Entry
from kvjax.struct import replace, struct


@struct
class LayerIndex:
  """The index of a layer, possibly in a stack.

  Attributes:
    arrays: arrays of the layer, or of a stack of layers.
    layer: index of the layer in the stack; None without a stack.
  """

  arrays: PyTree[Array]
  layer: Layer = None

  def read(self) -> PyTree[Array]:
    """Returns the layer's arrays, sliced out of the stack."""
    if self.layer is None:
      return self.arrays
    arrays: PyTree[Array] = index_stack(self.arrays, self.layer)
    return arrays

  def write(
    self, changes: PyTree[Array | Entry | None], read: Int[Array, "B K J M"]
  ) -> "LayerIndex":
    """Applies changes of all heads; see `Retrieval.update_index`.

    Args:
      changes: the changes.
      read: the slots that were retrieved, for which the index had to be read.
    """
    if changes is None:
      return self
    arrays = jax.tree.map(
      functools.partial(self._write, read),
      changes,
      self.arrays,
      # JAX takes None for an empty tree; here it may stand for a whole branch.
      is_leaf=lambda x: x is None or isinstance(x, Entry),
    )
    return replace(self, arrays=arrays)

  def _write(
    self, read: Int[Array, "B K J M"], change: Array | Entry | None, old: Any
  ) -> Any:
    if change is None:
      return old
    if isinstance(change, Entry):
      stack, layer = as_stack(old, self.layer)
      # The entries have been read for these slots. Unless the write depends on
      # that, XLA copies the stack.
      place = after(change.place, read)
      new: Array = scatter_entries(
        stack, layer, place, change.value, change.axis
      )
      return new if self.layer is not None else new[0]
    change = row_major(change.astype(old.dtype))
    if self.layer is None:
      return change
    update = jax.lax.dynamic_update_index_in_dim
    return update(old, change, jnp.asarray(self.layer), 0)
