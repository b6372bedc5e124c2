"""Packs rows of any dtype into 32-bit words, which a TPU core can address."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped, UInt

from kvjax.kernels.gather import tile_order

_SIGNED = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32}


def pack_words(rows: Shaped[Array, "M D"]) -> UInt[Array, "W D"]:
  """Packs rows into words; 32 / bits groups of eight rows share eight words."""
  packing = 4 // rows.dtype.itemsize
  bits = 32 // packing
  signed = pltpu.bitcast(rows, _SIGNED[rows.dtype.itemsize])
  words = signed.astype(jnp.int32).astype(jnp.uint32)
  # Parts are groups of eight rows, whole registers, so that no row moves
  # between sublanes.
  parts = words.reshape(-1, packing, tile_order.LINES, rows.shape[-1])
  # Conversion extended the signs: the shift drops those of the top part, masks
  # the others.
  words = parts[:, packing - 1] << jnp.uint32(32 - bits)
  for part in range(packing - 1):
    low = parts[:, part] & _ones(packing)
    words |= low << jnp.uint32(part * bits)
  return words.reshape(-1, rows.shape[-1])


def unpack_words(words: UInt[Array, "L D"], dtype: Any) -> Shaped[Array, "M D"]:
  """Unpacks the rows that share eight words."""
  packing = 4 // jnp.dtype(dtype).itemsize
  bits = 32 // packing
  parts = [words >> jnp.uint32(part * bits) for part in range(packing)]
  rows = jnp.concatenate(parts, axis=0).astype(jnp.int32)
  return pltpu.bitcast(rows.astype(_SIGNED[4 // packing]), dtype)


def copy_rows(
  codes: Any, start: Array, listed: Array, pairs: Sequence[tuple[Any, Any]]
) -> None:
  """Copies `plan.TURN` rows.

  Args:
    codes: source addresses; arbitrary valid ones for rows that are not listed.
    start: the first target row.
    listed: a bit per row; rows without it stay unchanged.
    pairs: source tiles, as words, and target tiles.
  """
  packing = 4 // pairs[0][1].dtype.itemsize
  bits = 32 // packing
  size = tile_order.LINES * packing
  shape = (tile_order.LINES, pairs[0][0].shape[-1])
  lines = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
  for group in range(tile_order.TURN // size):
    first_row = pl.multiple_of(start + group * size, size)
    gathered: list[list[Array]] = [[] for _ in pairs]
    for line in range(tile_order.LINES):
      for all_words, (source, _) in zip(gathered, pairs, strict=True):
        word = jnp.zeros((1, shape[1]), jnp.uint32)
        for part in range(packing):
          code = codes[0, 0, 0, 0, first_row + part * tile_order.LINES + line]
          row = source[pl.ds(code >> tile_order.SHIFT_BITS, 1), :]
          shift = code & ((1 << tile_order.SHIFT_BITS) - 1)
          row = (row >> shift.astype(jnp.uint32)) & _ones(packing)
          word |= row << jnp.uint32(part * bits)
        all_words.append(word)
    mask = _mask(listed >> jnp.uint32(group * size), lines, packing)
    place = (0, 0, pl.ds(first_row, size), slice(None))
    for all_words, (_, target) in zip(gathered, pairs, strict=True):
      # Rows that are not listed in this step keep what earlier steps wrote.
      merged = _stack(all_words, lines) & mask
      merged |= pack_words(target[place]) & ~mask
      target[place] = unpack_words(merged, target.dtype)


def _mask(
  listed: Array, lines: UInt[Array, "L D"], packing: int
) -> UInt[Array, "L D"]:
  """Computes a bit mask of the listed rows that share eight words."""
  mask = jnp.zeros_like(lines)
  for part in range(packing):
    bit = (
      listed >> (lines + jnp.uint32(part * tile_order.LINES))
    ) & jnp.uint32(1)
    mask |= (bit * _ones(packing)) << jnp.uint32(part * 32 // packing)
  return mask


def _ones(packing: int) -> Array:
  return jnp.uint32(0xFFFFFFFF >> (32 - 32 // packing))


def _stack(
  rows: list[UInt[Array, "1 D"]], lines: UInt[Array, "L D"]
) -> UInt[Array, "*L D"]:
  """Stacks rows; recursive halving keeps the chain of selections short."""
  if len(rows) == 1:
    return rows[0]
  half = len(rows) // 2
  low, high = _stack(rows[:half], lines), _stack(rows[half:], lines)
  return jnp.where((lines & jnp.uint32(half)) == 0, low, high)
