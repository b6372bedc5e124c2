"""Gathers listed slots on NVIDIA GPUs, one row per warpgroup step."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels import tuning
from kvjax.kernels.gather.compacted import Compacted

# Threads of a warpgroup, each of which copies an equal part of a row.
_THREADS = 128


def compact_gpu(
  keys: Shaped[Array, "B K T D"],
  values: Shaped[Array, "B K T Dv"],
  positions: Int[Array, "B K T"],
  received: Float[Array, "B K T"] | None,
  slots: Int[Array, "B K M"],
) -> Compacted:
  """Computes `kvjax.kernels.gather.compact`.

  Raises:
    NotImplementedError: keys and values differ in width, an array is empty, or
      D is no multiple of 128.
  """
  batch, kv_heads, _, dim = keys.shape
  size = slots.shape[-1]
  if keys.shape != values.shape:
    raise NotImplementedError("Keys and values have different widths.")
  if not (keys.size and size) or dim % _THREADS:
    raise NotImplementedError("There must be slots, and D a multiple of 128.")
  # Rows of a block. All are read before any is written, to keep many loads in
  # flight.
  rows = tuning.option("gather/gpu", "rows")
  arrays = [x for x in (keys, values, positions, received) if x is not None]
  new_keys, new_values, *rest = plgpu.kernel(
    functools.partial(_kernel, size, rows),
    out_type=[
      jax.ShapeDtypeStruct((batch, kv_heads, size, *x.shape[3:]), x.dtype)
      for x in arrays
    ],
    grid=(batch, kv_heads, pl.cdiv(size, rows)),
    grid_names=("B", "K", "M"),
  )(slots, *arrays)
  new_received = None if received is None else rest[1]
  return Compacted(new_keys, new_values, rest[0], new_received)


def _kernel(size: int, rows: int, slots: Any, *refs: Any) -> None:
  """Copies a block of rows of one head."""
  inputs, outputs = refs[: len(refs) // 2], refs[len(refs) // 2 :]
  row, head, block = (jax.lax.axis_index(axis) for axis in ("B", "K", "M"))
  loaded = []
  for i in range(rows):
    place = block * rows + i
    # Loads have no condition: places and slots are clamped to valid ones.
    slot = slots[row, head, jnp.minimum(place, size - 1)]
    at = (row, head, jnp.maximum(slot, 0))
    loaded.append((place, slot, [source[at] for source in inputs]))

  def write(place: Array, parts: Sequence[Array]) -> None:
    for target, part in zip(outputs, parts, strict=True):
      target[row, head, place] = part

  for place, slot, parts in loaded:
    # Mosaic can copy 8-bit numbers but not select between them, so the two
    # cases are separate writes.
    empty = [
      _filled(part, none)
      for part, none in zip(parts, (0, 0, -1, 0), strict=False)
    ]
    inside = place < size
    pl.when(inside & (slot >= 0))(functools.partial(write, place, parts))
    pl.when(inside & (slot < 0))(functools.partial(write, place, empty))


def _filled(part: Shaped[Array, "*D"], value: int) -> Shaped[Array, "*D"]:
  if part.ndim:
    return jnp.full_like(part, value)
  # Mosaic refuses scalars that are constants, such as those of `full_like`.
  return jnp.where(part == 0, value, value).astype(part.dtype)
