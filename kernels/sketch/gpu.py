"""Sketches and leverage rows on Hopper GPUs, in one pass over keys or columns.

Tensor cores multiply bfloat16 and add float32, so that float32 operands are cut
into pieces whose products are exact.
"""

import functools
import math

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from kvjax.kernels.sketch.gpu_leverage import leverage_tiles
from kvjax.kernels.sketch.gpu_sketch import sketch_tiles
from kvjax.kernels.sketch.gpu_work import STAGES, TILE, Work
from kvjax.kernels.sketch.pieces import pieces
from kvjax.kernels.sketch.sketched import (
  Sketch,
  by_chunk,
  centered,
  identity,
  near_mean,
)


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
    NotImplementedError: keys are neither float32 nor bfloat16, their size is
      not a multiple of 64, or the factor has too many columns.
  """
  if keys.dtype not in (jnp.float32, jnp.bfloat16):
    raise NotImplementedError(f"There is no sketch of {keys.dtype} on GPUs.")
  if keys.shape[-1] % 64:
    raise NotImplementedError(
      f"Sketches on GPUs are of 64 dims or a multiple, not {keys.shape[-1]}."
    )
  there = by_chunk(valid, chunk)
  *lead, slots = there.shape
  dim = keys.shape[-1]
  factor = identity(lead[1], dim) if factor is None else factor
  columns = factor.shape[-1]
  width = _up(columns, 64)
  # Float32 keys, or what a mean leaves of keys, are three pieces.
  cut = center or keys.dtype == jnp.float32
  per_slot = (
    STAGES * (dim * keys.dtype.itemsize + 4) + 12 * width + 6 * dim * cut
  )
  once = 6 * width * dim + 4 * dim * cut
  work = Work.of(math.prod(lead), slots, once, per_slot)
  if center:
    shift = near_mean(by_chunk(keys, chunk), there)
  else:
    shift = jnp.zeros((*lead, dim), jnp.float32)
  keys = jnp.pad(keys, ((0, 0), (0, 0), (0, -keys.shape[2] % 8), (0, 0)))
  factor = jnp.pad(factor, ((0, 0), (0, 0), (0, width - columns)))
  tiles = ((0, 0),) * 3 + ((0, -slots % TILE),)
  use = jnp.pad(there.astype(jnp.int32), tiles)
  groups = work.groups
  shared = {
    "factors": plgpu.SMEM((3 * width, dim), jnp.bfloat16),
    "tiles": plgpu.SMEM((groups, STAGES, TILE, dim), keys.dtype),
    "uses": plgpu.SMEM((groups, STAGES, TILE), jnp.int32),
    "cuts": plgpu.SMEM((groups, 4, width, TILE), jnp.bfloat16),
    "columns": plgpu.SMEM((groups, width, TILE), jnp.float32),
    "sums": plgpu.SMEM((groups, width), jnp.float32),
  }
  if cut:
    shared["origin"] = plgpu.SMEM((dim,), jnp.float32)
    shared["rests"] = plgpu.SMEM((groups, 3, TILE, dim), jnp.bfloat16)
  each = (work.chunks * work.workers,)
  projected, total, moment = work.run(
    functools.partial(sketch_tiles, per_row=(*lead[1:], slots)),
    [
      (work.chunks, _up(columns, 8), _up(slots, 32)),
      (*each, width),
      (*each, width, width),
    ],
    shared,
    (1 + cut, 2),
    keys.reshape(-1, *keys.shape[2:]),
    use.reshape(work.chunks, -1),
    jnp.concatenate(list(pieces(jnp.swapaxes(factor, 1, 2))), axis=1),
    shift.reshape(work.chunks, -1),
  )
  projected = projected.reshape(*lead, *projected.shape[1:])
  projected = projected[..., :columns, :]
  total = jnp.sum(total.reshape(*lead, -1, width), axis=3)
  moment = jnp.sum(moment.reshape(*lead, -1, width, width), axis=3)
  total, moment = total[..., :columns], moment[..., :columns, :columns]
  moment = (moment + jnp.swapaxes(moment, -1, -2)) / 2
  if center:
    return centered(projected, total, moment, there)
  return Sketch(projected, jnp.zeros_like(total), moment)


def leverage_rows(
  projected: Float[Array, "B K C k W"],
  mean: Float[Array, "B K C k"],
  whitener: Float[Array, "B K C k k"],
) -> Float[Array, "B K C W"]:
  """See `kvjax.kernels.sketch.api.leverage_rows`; also where nothing is held.

  Raises:
    NotImplementedError: there are too many columns.
  """
  *lead, columns, slots = projected.shape
  width = _up(columns, 64)
  more = (0, width - columns)
  whitener = jnp.pad(whitener, ((0, 0),) * 3 + (more, more))
  per_slot = 4 * STAGES * width + 6 * width + 4
  once = 6 * width * width + 4 * width
  work = Work.of(math.prod(lead), slots, once, per_slot)
  aligned = ((0, 0),) * 3 + ((0, -columns % 8), (0, -slots % 32))
  projected = jnp.pad(projected, aligned)
  groups = work.groups
  (rows,) = work.run(
    leverage_tiles,
    [(work.chunks, _up(slots, 4))],
    {
      "whiteners": plgpu.SMEM((3 * width, width), jnp.bfloat16),
      "origin": plgpu.SMEM((width,), jnp.float32),
      "tiles": plgpu.SMEM((groups, STAGES, width, TILE), jnp.float32),
      "cuts": plgpu.SMEM((groups, 3, width, TILE), jnp.bfloat16),
      "lengths": plgpu.SMEM((groups, TILE), jnp.float32),
    },
    (2, 1),
    projected.reshape(work.chunks, *projected.shape[3:]),
    jnp.pad(mean, ((0, 0),) * 3 + (more,)).reshape(work.chunks, -1),
    jnp.concatenate(list(pieces(whitener)), axis=3).reshape(
      work.chunks, 3 * width, width
    ),
  )
  return rows.reshape(*lead, -1)[..., :slots]


def _up(size: int, multiple: int) -> int:
  """The next multiple."""
  return size + -size % multiple
