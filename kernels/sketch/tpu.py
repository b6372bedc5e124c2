"""Sketches and leverage rows on TPUs, in one pass over keys or columns."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from kvjax.kernels.sketch.sketched import (
  Sketch,
  by_chunk,
  identity,
  near_mean,
)

# Float32 numbers of a step's slots, keys and columns together: 1.5 MiB, which
# leaves room for what they are cut into and for the next step's.
_STEP = 3 * 2**17


def sketch(
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  factor: Float[Array, "K D k"] | None,
  *,
  chunk: int,
  center: bool,
) -> Sketch:
  """See `kvjax.kernels.sketch.api.sketch`.

  Raises:
    NotImplementedError: keys are neither float32 nor bfloat16.
  """
  if keys.dtype not in (jnp.float32, jnp.bfloat16):
    raise NotImplementedError(f"There is no sketch of {keys.dtype} on TPUs.")
  parts, there = by_chunk(keys, chunk), by_chunk(valid, chunk)
  *lead, slots, dim = parts.shape
  factor = identity(lead[1], dim) if factor is None else factor
  width = factor.shape[-1]
  if center:
    shift = near_mean(parts, there)
  else:
    shift = jnp.zeros((*lead, dim), jnp.float32)
  tile = _tile(slots, dim + width)
  projected, mean, gram = pl.pallas_call(
    functools.partial(_sketch_tile, slots=slots, center=center),
    grid=(*lead, pl.cdiv(slots, tile)),
    in_specs=[
      pl.BlockSpec((1, 1, 1, tile, dim), lambda b, k, c, t: (b, k, c, t, 0)),
      _lanes(1, tile),
      pl.BlockSpec((1, width, dim), lambda b, k, c, t: (k, 0, 0)),
      _whole(1, dim),
    ],
    out_specs=[_lanes(width, tile), _whole(1, width), _whole(width, width)],
    out_shape=[
      jax.ShapeDtypeStruct((*lead, width, slots), jnp.float32),
      jax.ShapeDtypeStruct((*lead, 1, width), jnp.float32),
      jax.ShapeDtypeStruct((*lead, width, width), jnp.float32),
    ],
    scratch_shapes=[pltpu.VMEM((1, 1), jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",) * 3 + ("arbitrary",),
    ),
    name="sketch",
  )(
    parts,
    there[..., None, :].astype(jnp.int32),
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
  """Projects a tile of keys and adds it to what is summed over its chunk.

  The mean is a sum until the last tile, and zero where nothing is centered.
  """
  step = pl.program_id(3)

  @pl.when(step == 0)
  def _() -> None:
    for summed in (mean, gram, count):
      summed[...] = jnp.zeros(summed.shape, jnp.float32)

  rows = keys[0, 0, 0].astype(jnp.float32) - shift[0, 0, 0]
  columns = _product(factor[0], rows, 1, 1)
  tile = columns.shape[1]
  # What lies behind the last slot is anything.
  slot = jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1) + step * tile
  use = (valid[0, 0, 0] != 0) & (slot < slots)
  columns = jnp.where(use, columns, 0.0)
  projected[0, 0, 0] = columns
  gram[0, 0, 0] += _product(columns, columns, 1, 1)
  if center:
    ones = use.astype(jnp.float32)
    mean[0, 0, 0] += _product(ones, columns, 1, 1)
    count[...] += jnp.sum(ones, axis=1, keepdims=True)

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
      found = mean[0, 0, 0] / jnp.maximum(count[...], 1.0)
      mean[0, 0, 0] = found
      outer = _product(found, found, 0, 0)
      gram[0, 0, 0] -= count[...] * outer


def leverage_rows(
  projected: Float[Array, "B K C k W"],
  mean: Float[Array, "B K C k"],
  whitener: Float[Array, "B K C k k"],
) -> Float[Array, "B K C W"]:
  """See `kernels.sketch.api.leverage_rows`; also where nothing is held."""
  *lead, width, slots = projected.shape
  tile = _tile(slots, 2 * width)
  rows = pl.pallas_call(
    _leverage_tile,
    grid=(*lead, pl.cdiv(slots, tile)),
    in_specs=[_lanes(width, tile), _whole(1, width), _whole(width, width)],
    out_specs=_lanes(1, tile),
    out_shape=jax.ShapeDtypeStruct((*lead, 1, slots), jnp.float32),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",) * 4,
    ),
    name="leverage_rows",
  )(projected, mean[..., None, :], whitener)
  return rows[..., 0, :]


def _leverage_tile(projected: Any, mean: Any, whitener: Any, rows: Any) -> None:
  """Whitens a tile of columns and sums their squares."""
  whitened = _product(whitener[0, 0, 0], projected[0, 0, 0], 1, 0)
  whitened -= _product(whitener[0, 0, 0], mean[0, 0, 0], 1, 1)
  rows[0, 0, 0] = jnp.sum(whitened * whitened, axis=0, keepdims=True)


def _product(
  left: Float[Array, "..."], right: Float[Array, "..."], over: int, by: int
) -> Float[Array, "..."]:
  """Sums, in float32, over the one's axis `over` and the other's axis `by`."""
  return jax.lax.dot_general(
    left,
    right,
    (((over,), (by,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def _tile(slots: int, numbers: int) -> int:
  """Slots per step, a multiple of 128 or all."""
  return min(slots, max(_STEP // numbers // 128, 1) * 128)


def _lanes(rows: int, tile: int) -> pl.BlockSpec:
  """A tile of slots, which are the last axis."""
  return pl.BlockSpec((1, 1, 1, rows, tile), lambda b, k, c, t: (b, k, c, 0, t))


def _whole(*shape: int) -> pl.BlockSpec:
  """All there is of a chunk."""
  return pl.BlockSpec((1, 1, 1, *shape), lambda b, k, c, t: (b, k, c, 0, 0))
