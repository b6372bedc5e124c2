"""Functions of single tokens, computed chunk by chunk of long prompts.

What such a function needs in between is that of one chunk then, however long a
prompt is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.kernels.dispatch import target_platform

# By platform, the most tokens of a chunk: as many as keep a device busy.
MOST = {"cpu": 1024, "gpu": 8192, "tpu": 4096}


def map_tokens(
  function: Callable[..., PyTree[Array]], *inputs: PyTree[Array]
) -> PyTree[Array]:
  """Calls a function with a chunk of tokens at a time, if there are many.

  Args:
    function: maps arrays [B, S, ...] to arrays [B, ...] that have one axis of
      tokens, too; every token is computed alone.
    inputs: its arguments.
  """
  chunks = _Chunks.of(inputs)
  if chunks is None:
    return function(*inputs)

  def part(index: Int[Array, ""]) -> PyTree[Array]:
    return function(*chunks.read(index, inputs))

  def step(outputs: Any, index: Int[Array, ""]) -> tuple[Any, None]:
    return chunks.write(index, outputs, part(index), axes), None

  whole = jax.eval_shape(function, *inputs)
  axes = jax.tree.map(_token_axis, whole, jax.eval_shape(part, 0))
  outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), whole)
  return jax.lax.scan(step, outputs, chunks.numbers)[0]


def update_tokens(
  function: Callable[..., Float[Array, "B S E"]],
  x: Float[Array, "B S E"],
  *inputs: PyTree[Array],
) -> Float[Array, "B S E"]:
  """Replaces tokens by a function of them, a chunk at a time if they are many.

  Args:
    function: maps `x` and `inputs` to the new `x`; every token is computed
      alone.
    x: the tokens; their memory is reused.
    inputs: the other arguments, arrays [B, S, ...].
  """
  chunks = _Chunks.of(x)
  if chunks is None:
    return function(x, *inputs)

  def step(x: Any, index: Int[Array, ""]) -> tuple[Any, None]:
    part = function(*chunks.read(index, (x, *inputs)))
    return chunks.write(index, x, part, 1), None

  updated: Float[Array, "B S E"] = jax.lax.scan(step, x, chunks.numbers)[0]
  return updated


class _Chunks(NamedTuple):
  """The chunks of all rows, one row after another.

  Attributes:
    rows: number of rows.
    per_row: number of chunks of a row.
    size: tokens of a chunk.
  """

  rows: int
  per_row: int
  size: int

  @classmethod
  def of(cls, inputs: PyTree[Array]) -> "_Chunks | None":
    """Returns the chunks of arrays [B, S, ...]; None if they are one chunk."""
    rows, length = jax.tree.leaves(inputs)[0].shape[:2]
    most = MOST[target_platform()]
    # On a mesh, devices share out the width of what is in between.
    if rows * length <= most or jax.sharding.get_abstract_mesh().size > 1:
      return None
    sizes = range(min(most, length), most // 2 - 1, -1)
    size = next((size for size in sizes if length % size == 0), None)
    return None if size is None else cls(rows, length // size, size)

  @property
  def numbers(self) -> Int[Array, " C"]:
    """The numbers of all chunks."""
    return jnp.arange(self.rows * self.per_row, dtype=jnp.int32)

  def read(self, index: Int[Array, ""], arrays: PyTree[Array]) -> Any:
    """Returns a chunk of arrays [B, S, ...], as if its row were alone."""

    def part(x: Array) -> Array:
      sizes = (1, self.size, *x.shape[2:])
      return jax.lax.dynamic_slice(x, self._starts(index, x.ndim, 1), sizes)

    return jax.tree.map(part, arrays)

  def write(
    self,
    index: Int[Array, ""],
    arrays: PyTree[Array],
    part: PyTree[Array],
    axes: PyTree[int],
  ) -> Any:
    """Writes a chunk into arrays with these axes of tokens."""

    def written(x: Array, y: Array, axis: int) -> Array:
      starts = self._starts(index, x.ndim, axis)
      return jax.lax.dynamic_update_slice(x, y, starts)

    return jax.tree.map(written, arrays, part, axes)

  def _starts(
    self, index: Int[Array, ""], ndim: int, axis: int
  ) -> list[Int[Array, ""]]:
    """Returns where a chunk begins in an array with this axis of tokens."""
    starts = [jnp.zeros((), jnp.int32)] * ndim
    starts[0] = index // self.per_row
    starts[axis] = index % self.per_row * self.size
    return starts


def _token_axis(x: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct) -> int:
  """Returns the axis along which a chunk is shorter, the rows aside.

  Where a chunk is a whole row, none is, and any will do.
  """
  pairs = enumerate(zip(x.shape, y.shape, strict=True))
  return next((axis for axis, (a, b) in pairs if axis and a != b), 1)
