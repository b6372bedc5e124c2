"""Copies of listed slots by the warpgroups of an NVIDIA GPU, row by row."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.gather.compacted import Compacted

# Threads of a warpgroup: each copies as many numbers of a row as the others.
_THREADS = 128
# Rows of a block. All are read before any is written, so that many bytes are
# under way at once.
_ROWS = 16


def compact_gpu(
  keys: Shaped[Array, "B K T D"],
  values: Shaped[Array, "B K T Dv"],
  positions: Int[Array, "B K T"],
  received: Float[Array, "B K T"] | None,
  slots: Int[Array, "B K M"],
) -> Compacted:
  """See `kvjax.kernels.gather.compact`.

  Raises:
    NotImplementedError: for empty arrays, and unless D is a multiple of 128.
  """
  batch, kv_heads, _, dim = keys.shape
  most = slots.shape[-1]
  if keys.shape != values.shape:
    raise NotImplementedError("Keys and values have different widths.")
  if not (keys.size and most) or dim % _THREADS:
    raise NotImplementedError("There must be slots, and D a multiple of 128.")
  given = [x for x in (keys, values, positions, received) if x is not None]
  new_keys, new_values, *rest = plgpu.kernel(
    functools.partial(_kernel, most),
    out_type=[
      jax.ShapeDtypeStruct((batch, kv_heads, most, *x.shape[3:]), x.dtype)
      for x in given
    ],
    grid=(batch, kv_heads, pl.cdiv(most, _ROWS)),
    grid_names=("B", "K", "M"),
  )(slots, *given)
  new_received = None if received is None else rest[1]
  return Compacted(new_keys, new_values, rest[0], new_received)


def _kernel(most: int, slots: Any, *refs: Any) -> None:
  """A block of rows of one head."""
  olds, news = refs[: len(refs) // 2], refs[len(refs) // 2 :]
  row, head, block = (jax.lax.axis_index(axis) for axis in ("B", "K", "M"))
  found = []
  for i in range(_ROWS):
    place = block * _ROWS + i
    slot = slots[row, head, jnp.minimum(place, most - 1)]
    at = (row, head, jnp.maximum(slot, 0))
    found.append((place, slot, [old[at] for old in olds]))

  def write(place: Array, parts: Sequence[Array]) -> None:
    for new, part in zip(news, parts, strict=True):
      new[row, head, place] = part

  for place, slot, parts in found:
    # Nothing but a copy is defined there for numbers of 8 bits: no selection.
    nothing = [
      jnp.full_like(part, none)
      for part, none in zip(parts, (0, 0, -1, 0), strict=False)
    ]
    inside = place < most
    pl.when(inside & (slot >= 0))(functools.partial(write, place, parts))
    pl.when(inside & (slot < 0))(functools.partial(write, place, nothing))
