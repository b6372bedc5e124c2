"""Gathers listed slots while keys and values stream through a TPU core.

A core reads only the tiles of keys and values that contain a kept slot, and
copies the kept rows one by one to their places in a tile of the result. Rows in
VMEM are addressable if they consist of 32-bit words. In HBM several rows of a
narrower dtype share a word, so a single row cannot be read. A tile of the
result stays in VMEM until it has its rows from all source tiles.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels import tuning
from kvjax.kernels.gather import tile_order, words
from kvjax.kernels.gather.compacted import Compacted

# Numbers per register lane row, and per register.
_LINE = 128
_LINE_BITS = 7
_REGISTER = 1024
# Memory limits in bytes, facts of the hardware: a tile of keys, all tiles in
# VMEM, and the plan in scalar memory.
_TILE = 1 << 20
_TILES = 14 << 20
_PLAN = 1 << 19


def compact_tpu(
  keys: Shaped[Array, "B K T D"],
  values: Shaped[Array, "B K T Dv"],
  positions: Int[Array, "B K T"],
  remembered: Float[Array, "B K T"] | None,
  slots: Int[Array, "B K M"],
) -> Compacted:
  """Computes `kvjax.kernels.gather.compact`.

  Raises:
    NotImplementedError: keys and values differ in width, an array is empty, a
      dtype has more than 32 bits, or the tiles do not fit into VMEM.
  """
  size = slots.shape[-1]
  if keys.shape != values.shape:
    raise NotImplementedError("Keys and values have different widths.")
  if not (keys.size and size) or keys.dtype.itemsize > 4:
    raise NotImplementedError("There must be slots, of at most 32-bit numbers.")
  width = _round_up(keys.shape[-1], _LINE) * keys.dtype.itemsize
  fits = max(_TILE // width // _REGISTER, 1) * _REGISTER
  # Slots per tile that is read, a multiple of 1024, and that is written, one of
  # 128.
  read, write = (
    tuning.option("gather/tpu", name) for name in ("read", "write")
  )
  read = min(read, fits, _round_up(keys.shape[2], _REGISTER))
  write = min(write, _round_up(size, _LINE))
  # Keys and values: one copy as words, and two buffers each for reading and
  # writing, since tiles are double-buffered.
  if (6 * read + 4 * write) * width > _TILES:
    raise NotImplementedError("The keys are too wide for a core's memory.")
  numbers = [positions]
  if remembered is not None:
    # As integers: `_copy_numbers` adds zeros, and -0.0 + 0.0 would be 0.0.
    numbers.append(jax.lax.bitcast_convert_type(remembered, jnp.int32))
  gathered = _stream(keys, values, numbers, slots, read, write)
  new_positions, *rest = (
    x.reshape(*slots.shape[:2], -1)[..., :size] for x in gathered[2:]
  )
  if remembered is None:
    return Compacted(gathered[0], gathered[1], new_positions, None)
  new_remembered = jax.lax.bitcast_convert_type(rest[0], remembered.dtype)
  return Compacted(gathered[0], gathered[1], new_positions, new_remembered)


def _stream(
  keys: Shaped[Array, "B K T D"],
  values: Shaped[Array, "B K T Dv"],
  numbers: list[Int[Array, "B K T"]],
  slots: Int[Array, "B K M"],
  read: int,
  write: int,
) -> tuple[Array, ...]:
  """Gathers keys and values, and the numbers in the layout of tiles."""
  batch, kv_heads, size = slots.shape
  dim = keys.shape[-1]
  packing = 4 // keys.dtype.itemsize
  # The plan needs whole tiles; Pallas drops rows beyond the result.
  slots = jnp.pad(
    slots, ((0, 0), (0, 0), (0, -size % write)), constant_values=-1
  )
  steps = tile_order.Plan.of(slots, pl.cdiv(keys.shape[2], read), read, write)
  if 4 * sum(x.size for x in steps) > _PLAN:
    raise NotImplementedError("There are too many heads for one plan.")
  count = steps.source.shape[-1]

  def blocks(written: bool, *shape: int, **options: Any) -> pl.BlockSpec:
    def block(row: Array, head: Array, step: Array, *scalars: Any) -> Any:
      # The scalars are those of `Plan`: source tiles, target tiles, first rows.
      tile = scalars[written][(row * kv_heads + head) * count + step]
      return (row, head, tile, *[0] * (len(shape) - 1))

    return pl.BlockSpec((1, 1, *shape), block, **options)

  # Row addresses and bits go to scalar memory, slots to vector registers.
  codes = _to_tiles(tile_order.codes(slots, read, packing), 1, write)
  listed_bits = _to_tiles(
    tile_order.listed_bits(slots), 1, write // tile_order.TURN
  )
  slots = _to_tiles(slots, write // _LINE, _LINE)
  numbers = [_to_tiles(x, read // _LINE, _LINE) for x in numbers]
  scalars = [
    blocks(True, 1, *x.shape[3:], memory_space=pltpu.SMEM)
    for x in (codes, listed_bits)
  ]
  lines = blocks(True, 1, *slots.shape[3:])
  old_numbers = [blocks(False, 1, *x.shape[3:]) for x in numbers]
  results = [
    *[jax.ShapeDtypeStruct((batch, kv_heads, size, dim), keys.dtype)] * 2,
    *[jax.ShapeDtypeStruct(slots.shape, jnp.int32)] * len(numbers),
  ]
  heads = codes, listed_bits, slots, keys, values, *numbers
  operands = *(x.reshape(-1) for x in steps), *heads
  gathered: tuple[Array, ...] = pl.pallas_call(
    _kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(steps),
      grid=(batch, kv_heads, count),
      in_specs=[*scalars, lines, *[blocks(False, read, dim)] * 2, *old_numbers],
      out_specs=[*[blocks(True, write, dim)] * 2, *[lines] * len(numbers)],
      # Scratch outlives a step: the words of a source tile.
      scratch_shapes=[pltpu.VMEM((read // packing, dim), jnp.uint32)] * 2,
    ),
    out_shape=results,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary")
    ),
    cost_estimate=_cost((*operands, *results)),
    name="compact",
  )(*operands)
  return gathered


def _cost(arrays: Sequence[Any]) -> pl.CostEstimate:
  """Estimates the cost as if every tile were read once."""
  return pl.CostEstimate(
    flops=0,
    transcendentals=0,
    bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
  )


def _to_tiles(
  x: Int[Array, "B K t"], lines: int, size: int
) -> Int[Array, "B K n l s"]:
  x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % (lines * size))))
  return x.reshape(*x.shape[:2], -1, lines, size)


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple


def _kernel(
  source: Any,
  target: Any,
  first: Any,
  codes: Any,
  listed_bits: Any,
  slots: Any,
  keys: Any,
  values: Any,
  *rest: Any,
) -> None:
  """Runs a step: copies the rows that one tile contributes to a result tile."""
  *lines, key_words, value_words = rest
  count = len(lines) // 2 - 1
  numbers, results = lines[:count], lines[count:]
  row, head, step = (pl.program_id(axis) for axis in range(3))
  head = row * pl.num_programs(1) + head
  steps = pl.num_programs(2)
  at = head * steps + step
  before = jnp.maximum(at - 1, 0)

  # Pallas has just moved the previous tile out: this one is undefined.
  @pl.when((step == 0) | (target[at] != target[before]))
  def _() -> None:
    for result, fill in zip(results, (0, 0, -1, 0), strict=False):
      result[...] = jnp.full(result.shape, fill, result.dtype)

  # Several steps may read one source tile, which is packed only once.
  @pl.when((step == 0) | (source[at] != source[before]))
  def _() -> None:
    key_words[...] = words.pack_words(keys[0, 0])
    value_words[...] = words.pack_words(values[0, 0])

  start = target[at] * results[0].shape[2]
  begin, end = (first[head * (steps + 1) + step + i] - start for i in range(2))
  pairs = [(key_words, results[0]), (value_words, results[1])]

  def copy_rows(number: Array, _: None) -> None:
    first_row = number * tile_order.TURN
    # Mask the rows of earlier steps. Later steps overwrite rows after the last.
    done = jnp.maximum(begin - first_row, 0)
    listed = listed_bits[0, 0, 0, 0, number].astype(jnp.uint32)
    # `done` is below 32, since the loop starts at the word of row `begin`.
    listed &= jnp.uint32(0xFFFFFFFF) << done.astype(jnp.uint32)
    words.copy_rows(codes, first_row, listed, pairs)

  @pl.when(begin < end)
  def _() -> None:
    # Unlike `lax.div`, `//` looks up the chip while it is lowered.
    last = jax.lax.div(end + (tile_order.TURN - 1), tile_order.TURN)
    jax.lax.fori_loop(
      jax.lax.div(begin, tile_order.TURN), last, copy_rows, None
    )
    for source_numbers, target_numbers in zip(
      numbers, results[2:], strict=True
    ):
      _copy_numbers(slots, source_numbers, target_numbers, source[at])


def _copy_numbers(
  slots: Any, source_numbers: Any, target_numbers: Any, tile: Array
) -> None:
  """Copies the per-slot numbers of the slots in a tile."""
  shape = source_numbers.shape[-2:]
  lines = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  for line in range(target_numbers.shape[-2]):
    at = (0, 0, 0, pl.ds(line, 1), slice(None))
    inside = slots[at] - tile * (shape[0] * _LINE)
    in_tile = (inside >= 0) & (inside < shape[0] * _LINE)
    place = jnp.broadcast_to(inside & (_LINE - 1), shape)
    # A core gathers only within a line of 128 lanes. So each line gathers, and
    # the line that has the slot is kept.
    gathered = jnp.take_along_axis(
      source_numbers[0, 0, 0], place, axis=1, mode="promise_in_bounds"
    )
    gathered = jnp.where(lines == inside >> _LINE_BITS, gathered, 0)
    gathered = jnp.sum(gathered, axis=0, keepdims=True)
    target_numbers[at] = jnp.where(in_tile, gathered, target_numbers[at])
