"""The last tokens of every row of a block."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from kvjax.kernels.mesh_axes import CONTEXT, DATA, axis_size


def row_ends[Tree: PyTree](
  tree: Tree, positions: Int[Array, "B S"], size: int
) -> tuple[Tree, Int[Array, "B W"]]:
  """Returns the last real tokens of every row, and their positions.

  Args:
    tree: arrays [B, H, S, D], with a vector for each token of a block.
    positions: positions of the tokens; -1 for padding at the end.
    size: W, at most S. In a row with fewer real tokens, padding follows them.
  """
  length = positions.shape[1]
  if size == length:
    return tree, positions
  real = jnp.sum(positions >= 0, axis=1, dtype=jnp.int32)
  start = jnp.clip(real - size, 0, length - size)
  places = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
  take = functools.partial(jnp.take_along_axis, mode="clip")
  ends = take(positions, places, axis=1)
  if axis_size((DATA, CONTEXT), jax.sharding.get_abstract_mesh().shape) > 1:
    # Devices that share out rows or tokens gather what they have. A loop over
    # the rows would send them whole.
    index = places[:, None, :, None]
    return jax.tree.map(lambda x: take(x, index, axis=2), tree), ends

  def cut(row: tuple[Tree, Int[Array, ""]]) -> Tree:
    part, first = row
    slice_of = jax.lax.dynamic_slice_in_dim
    return jax.tree.map(lambda x: slice_of(x, first, size, axis=1), part)

  # Row by row: to gather some tokens, as `jax.vmap` would, too, XLA may copy
  # all of them to another layout first.
  return jax.lax.map(cut, (tree, start)), ends
