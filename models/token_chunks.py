"""Functions of single tokens, applied to long prompts a chunk at a time.

Their intermediate results are then those of a chunk, however long a prompt is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache.sharding import context_size, residual_axes, shard_residual
from kvjax.kernels.dispatch import target_platform
from kvjax.kernels.mesh_axes import DATA, axis_size

# By platform, the most tokens of a chunk: as many as keep a device busy.
MOST = {"cpu": 1024, "gpu": 8192, "tpu": 8192}


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

  def step(outputs: Any, index: Int[Array, ""]) -> tuple[Any, None]:
    part = function(*chunks.read(index, inputs))
    return chunks.write(index, outputs, part, axes), None

  whole = jax.eval_shape(function, *inputs)
  one = jax.eval_shape(lambda: function(*jax.tree.map(_first_token, inputs)))
  axes = jax.tree.map(_token_axis, whole, one)
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
    x_part, *rest = chunks.read(index, (x, *inputs))
    part = function(shard_residual(x_part), *rest)
    return chunks.write(index, x, shard_residual(part), 1), None

  updated: Float[Array, "B S E"] = jax.lax.scan(step, x, chunks.numbers)[0]
  return updated


class _Chunks(NamedTuple):
  """How rows of tokens are divided into chunks.

  Where devices share out the tokens of a row, each has consecutive ones, and a
  chunk has a part of those of every device.

  Attributes:
    rows: rows that have a chunk at a time; their number divides that of all.
    devices: number of devices that share out the tokens of a row.
    per_device: number of chunks.
    size: tokens of a chunk on each device.
    steps: number of chunks of all rows.
  """

  rows: int
  devices: int
  per_device: int
  size: int
  steps: int

  @classmethod
  def of(cls, inputs: PyTree[Array]) -> "_Chunks | None":
    """Returns the chunks of arrays [B, S, ...]; None if they are one chunk."""
    rows, length = jax.tree.leaves(inputs)[0].shape[:2]
    mesh = jax.sharding.get_abstract_mesh()
    # On a mesh, all rows take part, since devices share them out.
    at_once = rows if mesh.size > 1 else 1
    together = -(-at_once // mesh.shape.get(DATA, 1))
    devices = context_size()
    if devices == 1:
      # A chunk of the residual is gathered on all of them.
      devices = axis_size(residual_axes((rows, length)), mesh.shape)
      together *= devices
    most = max(MOST[target_platform()] // together, 1)
    each, rest = divmod(length, devices)
    if rest or rows // at_once * each < 2 * most:
      return None
    sizes = range(min(most, each), most // 2 - 1, -1)
    size = next((size for size in sizes if each % size == 0), None)
    if size is None:
      return None
    per_device = each // size
    return cls(at_once, devices, per_device, size, rows // at_once * per_device)

  @property
  def numbers(self) -> Int[Array, " C"]:
    """The numbers of all chunks."""
    return jnp.arange(self.steps, dtype=jnp.int32)

  def read(self, index: Int[Array, ""], arrays: PyTree[Array]) -> Any:
    """Returns a chunk of arrays [B, S, ...], as if its rows were alone."""

    def part(x: Array) -> Array:
      split = self._split(x, 1, self.per_device)
      sizes = (self.rows, self.devices, 1, self.size, *x.shape[2:])
      read = jax.lax.dynamic_slice(split, self._starts(index, x.ndim, 1), sizes)
      return read.reshape(self.rows, -1, *x.shape[2:])

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
      split = self._split(x, axis, self.per_device)
      starts = self._starts(index, x.ndim, axis)
      update = self._split(y, axis, 1)
      return jax.lax.dynamic_update_slice(split, update, starts).reshape(
        x.shape
      )

    return jax.tree.map(written, arrays, part, axes)

  def _split(self, x: Array, axis: int, chunks: int) -> Array:
    """Splits an axis of tokens into devices, chunks and tokens of a chunk."""
    shape = (self.devices, chunks, self.size)
    return x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :])

  def _starts(
    self, index: Int[Array, ""], ndim: int, axis: int
  ) -> list[Int[Array, ""]]:
    """Returns where a chunk begins in an array with a split axis of tokens."""
    starts = [jnp.zeros((), jnp.int32)] * (ndim + 2)
    starts[0] = index // self.per_device * self.rows
    starts[axis + 1] = index % self.per_device
    return starts


def _first_token(x: Array) -> Array:
  return x[:, :1]


def _token_axis(x: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct) -> int:
  """Returns the axis that is shorter for fewer tokens."""
  pairs = enumerate(zip(x.shape, y.shape, strict=True))
  return next(axis for axis, (a, b) in pairs if a != b)
