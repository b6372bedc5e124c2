"""How arrays lie in the memory of a TPU."""

from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

from kvjax.kernels.dispatch import target_platform

# Rows and columns of a tile of a TPU's memory.
_ROWS, _LANES = 8, 128


def row_major(x: Array) -> Array:
  """Keeps the axes of an array in their order in a TPU's memory.

  XLA chooses an order for what a program computes, and copies arguments into an
  order that suits the results. For one token of several rows, it copies the
  matrices that project keys and values, and all cached keys: once in every
  program that decodes, and those of a layer in every step.

  Args:
    x: an array of any shape.

  Returns:
    The array, with a constraint on its layout if it is compiled for a TPU and
    its last axis fills the lanes of the tiles. Of others, XLA should be free to
    put an axis there that does.
  """
  if target_platform() != "tpu" or not x.ndim or x.shape[-1] % _LANES:
    return x
  return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def whole_tiles(slots: int) -> int:
  """Rounds a number of slots up to whole tiles of a TPU's memory.

  If the slots of keys and values would leave the last tile in part empty, XLA
  lays out other axes in the tiles of an argument. Every program that decodes
  then copies all keys and values.

  Args:
    slots: a number of slots.

  Returns:
    As many or up to seven more on a TPU; as many elsewhere.
  """
  return slots if target_platform() != "tpu" else -(-slots // _ROWS) * _ROWS
