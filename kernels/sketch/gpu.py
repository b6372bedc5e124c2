"""Sketches and leverage rows on Hopper GPUs, in one pass over keys or columns.

Tensor cores multiply bfloat16 and accumulate float32. Float32 operands are
therefore split into bfloat16 pieces whose products are exact.
"""

import functools
import math

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from kvjax.kernels.chunks import by_chunk
from kvjax.kernels.sketch.gpu_leverage import leverage_tiles
from kvjax.kernels.sketch.gpu_sketch import sketch_tiles
from kvjax.kernels.sketch.gpu_work import STAGES, TILE, Work
from kvjax.kernels.sketch.pieces import pieces
from kvjax.kernels.sketch.sketched import Sketch, centered, identity, near_mean


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
    NotImplementedError: keys are neither float32 nor bfloat16, D is not a
      multiple of 64, chunks of bfloat16 keys that are not centered are no
      multiple of 8, or the factor has too many columns.
  """
  if keys.dtype not in (jnp.float32, jnp.bfloat16):
    raise NotImplementedError(f"There is no sketch of {keys.dtype} on GPUs.")
  if keys.shape[-1] % 64:
    raise NotImplementedError(
      f"Sketches on GPUs are of 64 dims or a multiple, not {keys.shape[-1]}."
    )
  chunk_valid = by_chunk(valid, chunk)
  *lead, slots = chunk_valid.shape
  dim = keys.shape[-1]
  factor = identity(lead[1], dim) if factor is None else factor
  columns = factor.shape[-1]
  width = _round_up(columns, 64)
  # Float32 keys, and centered keys of any dtype, need three pieces.
  in_pieces = center or keys.dtype == jnp.float32
  if not in_pieces and lead[2] > 1 and slots % 8:
    # Mosaic finds no layout for a copy that starts within a tile of 8 rows.
    raise NotImplementedError(f"GPUs copy tiles of 8, not chunks of {slots}.")
  # Bytes of the scratch below: prefetched keys and their validity, columns and
  # their pieces, pieces of keys; and per block, the factor and the shift.
  slot_bytes = (
    STAGES * (dim * keys.dtype.itemsize + 4) + 12 * width + 6 * dim * in_pieces
  )
  block_bytes = 6 * width * dim + 4 * dim * in_pieces
  work = Work.of(math.prod(lead), slots, block_bytes, slot_bytes)
  if center:
    shift = near_mean(by_chunk(keys, chunk), chunk_valid)
  else:
    shift = jnp.zeros((*lead, dim), jnp.float32)
  # Mosaic copies tiles of 8 rows of 128 bytes, and only whole ones.
  keys = jnp.pad(keys, ((0, 0), (0, 0), (0, -keys.shape[2] % 8), (0, 0)))
  factor = jnp.pad(factor, ((0, 0), (0, 0), (0, width - columns)))
  tiles = ((0, 0),) * 3 + ((0, -slots % TILE),)
  use = jnp.pad(chunk_valid.astype(jnp.int32), tiles)
  groups = work.groups
  shared = {
    "factors": plgpu.SMEM((3 * width, dim), jnp.bfloat16),
    "tiles": plgpu.SMEM((groups, STAGES, TILE, dim), keys.dtype),
    "uses": plgpu.SMEM((groups, STAGES, TILE), jnp.int32),
    "cuts": plgpu.SMEM((groups, 4, width, TILE), jnp.bfloat16),
    "columns": plgpu.SMEM((groups, width, TILE), jnp.float32),
    "sums": plgpu.SMEM((groups, width), jnp.float32),
  }
  if in_pieces:
    shared["origin"] = plgpu.SMEM((dim,), jnp.float32)
    shared["rests"] = plgpu.SMEM((groups, 3, TILE, dim), jnp.bfloat16)
  # Every warpgroup writes its own sums: atomic additions have no fixed order.
  per_worker = (work.chunks * work.workers,)
  projected, total, moment = work.run(
    functools.partial(sketch_tiles, per_row=(*lead[1:], slots)),
    [
      (work.chunks, _round_up(columns, 8), _round_up(slots, 32)),
      (*per_worker, width),
      (*per_worker, width, width),
    ],
    shared,
    (1 + in_pieces, 2),
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
  # The kernel adds mixed products of pieces twice, not their transposes.
  moment = (moment + jnp.swapaxes(moment, -1, -2)) / 2
  if center:
    return centered(projected, total, moment, chunk_valid)
  return Sketch(projected, jnp.zeros_like(total), moment)


def leverage_rows(
  projected: Float[Array, "B K C k W"],
  mean: Float[Array, "B K C k"],
  whitener: Float[Array, "B K C k k"],
) -> Float[Array, "B K C W"]:
  """Computes `kvjax.kernels.sketch.api.leverage_rows`, without its mask.

  Raises:
    NotImplementedError: there are too many columns.
  """
  *lead, columns, slots = projected.shape
  width = _round_up(columns, 64)
  padding = (0, width - columns)
  whitener = jnp.pad(whitener, ((0, 0),) * 3 + (padding, padding))
  # Prefetched columns, their pieces and the output; per block, the whitener and
  # the mean.
  slot_bytes = 4 * STAGES * width + 6 * width + 4
  block_bytes = 6 * width * width + 4 * width
  work = Work.of(math.prod(lead), slots, block_bytes, slot_bytes)
  aligned = ((0, 0),) * 3 + ((0, -columns % 8), (0, -slots % 32))
  projected = jnp.pad(projected, aligned)
  groups = work.groups
  (rows,) = work.run(
    leverage_tiles,
    [(work.chunks, _round_up(slots, 4))],
    {
      "whiteners": plgpu.SMEM((3 * width, width), jnp.bfloat16),
      "origin": plgpu.SMEM((width,), jnp.float32),
      "tiles": plgpu.SMEM((groups, STAGES, width, TILE), jnp.float32),
      "cuts": plgpu.SMEM((groups, 3, width, TILE), jnp.bfloat16),
      "lengths": plgpu.SMEM((groups, TILE), jnp.float32),
    },
    (2, 1),
    projected.reshape(work.chunks, *projected.shape[3:]),
    jnp.pad(mean, ((0, 0),) * 3 + (padding,)).reshape(work.chunks, -1),
    jnp.concatenate(list(pieces(whitener)), axis=3).reshape(
      work.chunks, 3 * width, width
    ),
  )
  return rows.reshape(*lead, -1)[..., :slots]


def _round_up(size: int, multiple: int) -> int:
  """Rounds up to the next multiple."""
  return size + -size % multiple
