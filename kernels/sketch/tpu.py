"""Sketches and leverage rows on TPUs, in one pass over keys or columns."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from kvjax.kernels import tuning
from kvjax.kernels.chunks import by_chunk
from kvjax.kernels.sketch.sketched import Sketch, identity, near_mean


def sketch(
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  factor: Float[Array, "K D k"] | None,
  *,
  chunk: int,
  center: bool,
) -> Sketch:
  """Computes `kvjax.kernels.sketch.api.sketch`.

  Raises:
    NotImplementedError: keys are neither float32 nor bfloat16.
  """
  if keys.dtype not in (jnp.float32, jnp.bfloat16):
    raise NotImplementedError(f"There is no sketch of {keys.dtype} on TPUs.")
  parts, chunk_valid = by_chunk(keys, chunk), by_chunk(valid, chunk)
  *lead, slots, dim = parts.shape
  factor = identity(lead[1], dim) if factor is None else factor
  width = factor.shape[-1]
  if center:
    shift = near_mean(parts, chunk_valid)
  else:
    shift = jnp.zeros((*lead, dim), jnp.float32)
  tile = _tile(slots, dim + width)
  projected, mean, gram = pl.pallas_call(
    functools.partial(_sketch_tile, slots=slots, center=center),
    grid=(*lead, pl.cdiv(slots, tile)),
    in_specs=[
      pl.BlockSpec((1, 1, 1, tile, dim), lambda b, k, c, t: (b, k, c, t, 0)),
      _slots_block(1, tile),
      pl.BlockSpec((1, width, dim), lambda b, k, c, t: (k, 0, 0)),
      _chunk_block(1, dim),
    ],
    # Sums keep their block over the tiles of a chunk and add up in VMEM.
    out_specs=[
      _slots_block(width, tile),
      _chunk_block(1, width),
      _chunk_block(width, width),
    ],
    out_shape=[
      jax.ShapeDtypeStruct((*lead, width, slots), jnp.float32),
      jax.ShapeDtypeStruct((*lead, 1, width), jnp.float32),
      jax.ShapeDtypeStruct((*lead, width, width), jnp.float32),
    ],
    scratch_shapes=[pltpu.VMEM((1, 1), jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",) * 3 + ("arbitrary",)
    ),
    name="sketch",
  )(
    parts,
    chunk_valid[..., None, :].astype(jnp.int32),
    jnp.swapaxes(factor, 1, 2),
    shift[..., None, :],
  )
  return Sketch(projected, mean[..., 0, :], gram)


def _sketch_tile(
  keys: Any,
  valid: Any,
  factor: Any,
  shift: Any,
  projected: Any,
  mean: Any,
  gram: Any,
  count: Any,
  *,
  slots: int,
  center: bool,
) -> None:
  """Projects a tile of keys and adds it to the sums over its chunk.

  `mean` is a sum until the last tile, and zero without centering.
  """
  step = pl.program_id(3)

  @pl.when(step == 0)
  def _() -> None:
    for summed in (mean, gram, count):
      summed[...] = jnp.zeros(summed.shape, jnp.float32)

  # NaN in an empty slot affects only its own column, which is masked below.
  rows = keys[0, 0, 0].astype(jnp.float32) - shift[0, 0, 0]
  columns = _product(factor[0], rows, 1, 1)
  tile = columns.shape[1]
  # The last tile may be undefined beyond the last slot.
  slot = jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1) + step * tile
  is_valid = (valid[0, 0, 0] != 0) & (slot < slots)
  columns = jnp.where(is_valid, columns, 0.0)
  projected[0, 0, 0] = columns
  gram[0, 0, 0] += _product(columns, columns, 1, 1)
  if center:
    weights = is_valid.astype(jnp.float32)
    mean[0, 0, 0] += _product(weights, columns, 1, 1)
    count[...] += jnp.sum(weights, axis=1, keepdims=True)

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
      final_mean = mean[0, 0, 0] / jnp.maximum(count[...], 1.0)
      mean[0, 0, 0] = final_mean
      # sum (x - m)(x - m)' = sum x x' - n m m', as in `sketched.centered`.
      outer = _product(final_mean, final_mean, 0, 0)
      gram[0, 0, 0] -= count[...] * outer


def leverage_rows(
  projected: Float[Array, "B K C k W"],
  mean: Float[Array, "B K C k"],
  whitener: Float[Array, "B K C k k"],
) -> Float[Array, "B K C W"]:
  """Computes `kernels.sketch.api.leverage_rows`, without its mask."""
  *lead, width, slots = projected.shape
  tile = _tile(slots, 2 * width)
  rows = pl.pallas_call(
    _leverage_tile,
    grid=(*lead, pl.cdiv(slots, tile)),
    in_specs=[
      _slots_block(width, tile),
      _chunk_block(1, width),
      _chunk_block(width, width),
    ],
    out_specs=_slots_block(1, tile),
    out_shape=jax.ShapeDtypeStruct((*lead, 1, slots), jnp.float32),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 4),
    name="leverage_rows",
  )(projected, mean[..., None, :], whitener)
  return rows[..., 0, :]


def _leverage_tile(projected: Any, mean: Any, whitener: Any, rows: Any) -> None:
  """Whitens a tile of columns and sums their squares."""
  whitened = _product(whitener[0, 0, 0], projected[0, 0, 0], 1, 0)
  # The product turns the row `mean` into a column, which can be subtracted.
  whitened -= _product(whitener[0, 0, 0], mean[0, 0, 0], 1, 1)
  rows[0, 0, 0] = jnp.sum(whitened * whitened, axis=0, keepdims=True)


def _product(
  left: Float[Array, "..."], right: Float[Array, "..."], over: int, by: int
) -> Float[Array, "..."]:
  """Contracts axis `over` of left with axis `by` of right, in float32."""
  return jax.lax.dot_general(
    left,
    right,
    (((over,), (by,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def _tile(slots: int, numbers: int) -> int:
  """Returns the slots per step, a multiple of 128 or all."""
  # Float32 numbers per step, keys and columns together. 1.5 MiB leave space for
  # bfloat16 pieces and for the next step's buffers.
  step = tuning.option("sketch/tpu", "step")
  # Slots are lanes in the results, hence 128.
  return min(slots, max(step // numbers // 128, 1) * 128)


def _slots_block(rows: int, tile: int) -> pl.BlockSpec:
  """Describes a block of a tile of slots, which are the last axis."""
  return pl.BlockSpec((1, 1, 1, rows, tile), lambda b, k, c, t: (b, k, c, 0, t))


def _chunk_block(*shape: int) -> pl.BlockSpec:
  """Describes a block with all of a chunk."""
  return pl.BlockSpec((1, 1, 1, *shape), lambda b, k, c, t: (b, k, c, 0, 0))
