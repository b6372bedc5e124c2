"""Stacks of layers, which programs read and write without copying a layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree, Shaped

# The layer of a stack; None for arrays of a single layer.
Layer = Int[Array, ""] | None


def as_stack(tree: PyTree, layer: Layer) -> tuple[PyTree, Int[Array, ""]]:
  """Returns arrays with a leading axis of layers, and the layer's index.

  Args:
    tree: arrays of one layer, or stacks of layers.
    layer: the layer of the stacks; None for arrays of one layer.
  """
  if layer is not None:
    return tree, jnp.asarray(layer, jnp.int32)
  # Adding an axis of size 1 is a reshape, so nothing is copied.
  return jax.tree.map(lambda x: x[None], tree), jnp.zeros((), jnp.int32)


def index_stack(tree: PyTree, layer: Int[Array, ""]) -> PyTree:
  """Slices one layer out of stacks; XLA fuses the slices into their readers."""

  def index(x: Shaped[Array, "L *B"]) -> Shaped[Array, "*B"]:
    # `layer` can only be 0 here. A static index costs nothing.
    if x.shape[0] == 1:
      return x[0]
    return jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)

  return jax.tree.map(index, tree)


def gather_slots(
  stack: Shaped[Array, "L B K T D"],
  layer: Int[Array, ""],
  slots: Int[Array, "B K M"],
) -> Shaped[Array, "B K M D"]:
  """Copies slots of a layer.

  Slots must be in bounds: they are not checked, and negative ones do not wrap.
  """
  # A gather of x[layer] would copy the layer first.
  index = jnp.stack([jnp.broadcast_to(layer, slots.shape), slots], axis=-1)
  return jax.lax.gather(
    stack,
    index,
    jax.lax.GatherDimensionNumbers(
      # Layers (0) and slots (3) are indexed; rows and KV heads are batch axes
      # of both operands, so that no index has to repeat them.
      offset_dims=(3,),
      collapsed_slice_dims=(0, 3),
      start_index_map=(0, 3),
      operand_batching_dims=(1, 2),
      start_indices_batching_dims=(0, 1),
    ),
    slice_sizes=(1, 1, 1, 1, stack.shape[-1]),
    mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )


def after(
  value: Int[Array, "B K *A"], *reads: Shaped[Array, "B K *R"]
) -> Int[Array, "B K *A"]:
  """Returns `value`, which depends on the reads from then on.

  A program that reads and writes an array must do so in this order, or XLA
  copies all layers of it. XLA sees the order only if what is written, or where,
  depends on what is read; it drops barriers before it decides.
  """
  # Reads are slots or float vectors. Int8 entries would not do: every quantized
  # vector has an entry of +-127, so that `never` would often be true.
  for read in reads:
    axes = tuple(range(2, read.ndim))
    # Never true, but the compiler cannot know.
    integer = jnp.issubdtype(read.dtype, jnp.integer)
    info = jnp.iinfo(read.dtype) if integer else jnp.finfo(read.dtype)
    # An infinity is not finfo.max, so it does not set `never` either.
    never = jnp.max(read, axis=axes, initial=info.min) == info.max
    never = never.reshape(*never.shape, *[1] * (value.ndim - 2))
    value = jnp.where(never, -1, value)
  return value


def scatter_entries(
  stack: Shaped[Array, "L B K *T"],
  layer: Int[Array, ""],
  places: Int[Array, "B K"],
  entries: Shaped[Array, "B K *E"],
  axis: int,
) -> Shaped[Array, "L B K *T"]:
  """Writes an entry of each head of a layer; the rest stays where it is.

  Args:
    stack: arrays of several layers.
    layer: the layer.
    places: where the entries go along the axis; nothing is written beyond it.
    entries: the entries, without the axis.
    axis: axis of a head's array, 0 for the first after K.
  """
  index = jnp.stack([jnp.broadcast_to(layer, places.shape), places], axis=-1)
  return jax.lax.scatter(
    stack,
    index,
    entries.astype(stack.dtype),
    jax.lax.ScatterDimensionNumbers(
      # The axes of `stack` are L, B, K and those of a head, hence axis + 3.
      update_window_dims=tuple(range(2, entries.ndim)),
      inserted_window_dims=(0, axis + 3),
      scatter_dims_to_operand_dims=(0, axis + 3),
      operand_batching_dims=(1, 2),
      scatter_indices_batching_dims=(0, 1),
    ),
    # With B and K as batch axes, each scatter has a single index.
    indices_are_sorted=True,
    unique_indices=True,
    mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
  )
