"""Rows of any dtype as rows of 32-bit words, as a TPU core can address them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped, UInt

from kvjax.kernels.gather import plan

_SIGNED = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32}


def packed(rows: Shaped[Array, "M D"]) -> UInt[Array, "W D"]:
  """Rows as words: as many times eight rows share eight words as fit."""
  packing = 4 // rows.dtype.itemsize
  bits = 32 // packing
  signed = pltpu.bitcast(rows, _SIGNED[rows.dtype.itemsize])
  words = signed.astype(jnp.int32).astype(jnp.uint32)
  parts = words.reshape(-1, packing, plan.LINES, rows.shape[-1])
  words = parts[:, packing - 1] << jnp.uint32(32 - bits)
  for part in range(packing - 1):
    low = parts[:, part] & _ones(packing)
    words |= low << jnp.uint32(part * bits)
  return words.reshape(-1, rows.shape[-1])


def unpacked(words: UInt[Array, "L D"], dtype: Any) -> Shaped[Array, "M D"]:
  """The rows that share eight words."""
  packing = 4 // jnp.dtype(dtype).itemsize
  bits = 32 // packing
  parts = [words >> jnp.uint32(part * bits) for part in range(packing)]
  rows = jnp.concatenate(parts, axis=0).astype(jnp.int32)
  return pltpu.bitcast(rows.astype(_SIGNED[4 // packing]), dtype)


def copy(
  codes: Any, start: Array, meant: Array, pairs: Sequence[tuple[Any, Any]]
) -> None:
  """Copies `plan.TURN` rows.

  Args:
    codes: where they lie; anywhere in the tile for rows that are not meant.
    start: first of them in the result.
    meant: a bit for each; the others stay as they are.
    pairs: tiles that are read, as words, and written.
  """
  packing = 4 // pairs[0][1].dtype.itemsize
  bits = 32 // packing
  size = plan.LINES * packing
  shape = (plan.LINES, pairs[0][0].shape[-1])
  lines = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
  for group in range(plan.TURN // size):
    begun = pl.multiple_of(start + group * size, size)
    made: list[list[Array]] = [[] for _ in pairs]
    for line in range(plan.LINES):
      for all_words, (old, _) in zip(made, pairs, strict=True):
        word = jnp.zeros((1, shape[1]), jnp.uint32)
        for part in range(packing):
          code = codes[0, 0, 0, 0, begun + part * plan.LINES + line]
          found = old[pl.ds(code >> plan.SHIFT_BITS, 1), :]
          shift = code & ((1 << plan.SHIFT_BITS) - 1)
          found = (found >> shift.astype(jnp.uint32)) & _ones(packing)
          word |= found << jnp.uint32(part * bits)
        all_words.append(word)
    mask = _mask(meant >> jnp.uint32(group * size), lines, packing)
    place = (0, 0, pl.ds(begun, size), slice(None))
    for all_words, (_, new) in zip(made, pairs, strict=True):
      merged = _stacked(all_words, lines) & mask
      merged |= packed(new[place]) & ~mask
      new[place] = unpacked(merged, new.dtype)


def _mask(
  meant: Array, lines: UInt[Array, "L D"], packing: int
) -> UInt[Array, "L D"]:
  """The bits of those rows, of all that share eight words, that are meant."""
  mask = jnp.zeros_like(lines)
  for part in range(packing):
    own = (meant >> (lines + jnp.uint32(part * plan.LINES))) & jnp.uint32(1)
    mask |= (own * _ones(packing)) << jnp.uint32(part * 32 // packing)
  return mask


def _ones(packing: int) -> Array:
  return jnp.uint32(0xFFFFFFFF >> (32 - 32 // packing))


def _stacked(
  rows: list[UInt[Array, "1 D"]], lines: UInt[Array, "L D"]
) -> UInt[Array, "*L D"]:
  """Rows one below the other; halving keeps the chain of selections short."""
  if len(rows) == 1:
    return rows[0]
  half = len(rows) // 2
  low, high = _stacked(rows[:half], lines), _stacked(rows[half:], lines)
  return jnp.where((lines & jnp.uint32(half)) == 0, low, high)
