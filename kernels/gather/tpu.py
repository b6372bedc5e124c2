"""Copies of listed slots while keys and values stream through a TPU core.

A core reads those tiles of keys and values alone of which something is kept,
and copies the kept rows one after the other to where they belong in a tile of
the result. Rows of the core's memory have addresses, if they consist of 32-bit
words; in HBM several rows share a word, and none can be read by itself. A tile
of the result stays with the core until all that it takes from several tiles is
there.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.gather import plan, words
from kvjax.kernels.gather.compacted import Compacted

# Numbers of a register's line, and of a whole register.
_LINE = 128
_LINE_BITS = 7
_REGISTER = 1024
# Bytes of a core's memory: of a tile of keys, of all tiles, and of the plan,
# which lies in the memory for scalars.
_TILE = 1 << 20
_TILES = 14 << 20
_PLAN = 1 << 19


def compact_tpu(
  keys: Shaped[Array, "B K T D"],
  values: Shaped[Array, "B K T Dv"],
  positions: Int[Array, "B K T"],
  received: Float[Array, "B K T"] | None,
  slots: Int[Array, "B K M"],
  read: int = 2048,
  write: int = 1024,
) -> Compacted:
  """See `kvjax.kernels.gather.compact`.

  Args:
    keys: keys.
    values: values.
    positions: places.
    received: what else is known.
    slots: which to copy.
    read: slots of a tile that is read, a multiple of 1024; fewer where keys
      are wide.
    write: slots of a tile that is written, a multiple of 128.

  Raises:
    NotImplementedError: for empty arrays, for dtypes of more than 32 bits, and
      where a core's memory is too small.
  """
  most = slots.shape[-1]
  if keys.shape != values.shape:
    raise NotImplementedError("Keys and values have different widths.")
  if not (keys.size and most) or keys.dtype.itemsize > 4:
    raise NotImplementedError("There must be slots, of at most 32-bit numbers.")
  width = _up(keys.shape[-1], _LINE) * keys.dtype.itemsize
  fits = max(_TILE // width // _REGISTER, 1) * _REGISTER
  read = min(read, fits, _up(keys.shape[2], _REGISTER))
  write = min(write, _up(most, _LINE))
  # Keys and values: once as words, else twice, since the next tile comes while
  # one is in use.
  if (6 * read + 4 * write) * width > _TILES:
    raise NotImplementedError("The keys are too wide for a core's memory.")
  numbers = [positions]
  if received is not None:
    numbers.append(jax.lax.bitcast_convert_type(received, jnp.int32))
  found = _stream(keys, values, numbers, slots, read, write)
  new_positions, *rest = (
    x.reshape(*slots.shape[:2], -1)[..., :most] for x in found[2:]
  )
  if received is None:
    return Compacted(found[0], found[1], new_positions, None)
  new_received = jax.lax.bitcast_convert_type(rest[0], received.dtype)
  return Compacted(found[0], found[1], new_positions, new_received)


def _stream(
  keys: Shaped[Array, "B K T D"],
  values: Shaped[Array, "B K T Dv"],
  numbers: list[Int[Array, "B K T"]],
  slots: Int[Array, "B K M"],
  read: int,
  write: int,
) -> tuple[Array, ...]:
  """The listed keys and values; and the listed numbers, in lines of tiles."""
  batch, kv_heads, most = slots.shape
  dim = keys.shape[-1]
  packing = 4 // keys.dtype.itemsize
  slots = jnp.pad(
    slots, ((0, 0), (0, 0), (0, -most % write)), constant_values=-1
  )
  steps = plan.Plan.of(slots, pl.cdiv(keys.shape[2], read), read, write)
  if 4 * sum(x.size for x in steps) > _PLAN:
    raise NotImplementedError("There are too many heads for one plan.")
  count = steps.source.shape[-1]

  def blocks(written: bool, *shape: int, **options: Any) -> pl.BlockSpec:
    def block(row: Array, head: Array, step: Array, *scalars: Any) -> Any:
      tile = scalars[written][(row * kv_heads + head) * count + step]
      return (row, head, tile, *[0] * (len(shape) - 1))

    return pl.BlockSpec((1, 1, *shape), block, **options)

  codes = _tiles(plan.codes(slots, read, packing), 1, write)
  named = _tiles(plan.named(slots), 1, write // plan.TURN)
  slots = _tiles(slots, write // _LINE, _LINE)
  numbers = [_tiles(x, read // _LINE, _LINE) for x in numbers]
  scalars = [
    blocks(True, 1, *x.shape[3:], memory_space=pltpu.SMEM)
    for x in (codes, named)
  ]
  lines = blocks(True, 1, *slots.shape[3:])
  old_numbers = [blocks(False, 1, *x.shape[3:]) for x in numbers]
  results = [
    *[jax.ShapeDtypeStruct((batch, kv_heads, most, dim), keys.dtype)] * 2,
    *[jax.ShapeDtypeStruct(slots.shape, jnp.int32)] * len(numbers),
  ]
  heads = codes, named, slots, keys, values, *numbers
  given = *(x.reshape(-1) for x in steps), *heads
  found: tuple[Array, ...] = pl.pallas_call(
    _kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(steps),
      grid=(batch, kv_heads, count),
      in_specs=[*scalars, lines, *[blocks(False, read, dim)] * 2, *old_numbers],
      out_specs=[*[blocks(True, write, dim)] * 2, *[lines] * len(numbers)],
      scratch_shapes=[pltpu.VMEM((read // packing, dim), jnp.uint32)] * 2,
    ),
    out_shape=results,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary")
    ),
    cost_estimate=_cost((*given, *results)),
    name="compact",
  )(*given)
  return found


def _cost(arrays: Sequence[Any]) -> pl.CostEstimate:
  """Tiles go by once, as if each had something to keep."""
  return pl.CostEstimate(
    flops=0,
    transcendentals=0,
    bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
  )


def _tiles(
  x: Int[Array, "B K t"], lines: int, size: int
) -> Int[Array, "B K n l s"]:
  x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % (lines * size))))
  return x.reshape(*x.shape[:2], -1, lines, size)


def _up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple


def _kernel(
  source: Any,
  target: Any,
  first: Any,
  codes: Any,
  named: Any,
  slots: Any,
  keys: Any,
  values: Any,
  *rest: Any,
) -> None:
  """A step: the rows of one tile that belong into one tile of the result."""
  *lines, key_words, value_words = rest
  count = len(lines) // 2 - 1
  numbers, results = lines[:count], lines[count:]
  row, head, step = (pl.program_id(axis) for axis in range(3))
  head = row * pl.num_programs(1) + head
  steps = pl.num_programs(2)
  at = head * steps + step
  before = jnp.maximum(at - 1, 0)

  @pl.when((step == 0) | (target[at] != target[before]))
  def _() -> None:
    for result, none in zip(results, (0, 0, -1, 0), strict=False):
      result[...] = jnp.full(result.shape, none, result.dtype)

  @pl.when((step == 0) | (source[at] != source[before]))
  def _() -> None:
    key_words[...] = words.packed(keys[0, 0])
    value_words[...] = words.packed(values[0, 0])

  start = target[at] * results[0].shape[2]
  begin, end = (first[head * (steps + 1) + step + i] - start for i in range(2))
  pairs = [(key_words, results[0]), (value_words, results[1])]

  def turn(number: Array, _: None) -> None:
    begun = number * plan.TURN
    # Rows before the first are done; those after the last are still to come.
    done = jnp.maximum(begin - begun, 0)
    meant = named[0, 0, 0, 0, number].astype(jnp.uint32)
    meant &= jnp.uint32(0xFFFFFFFF) << done.astype(jnp.uint32)
    words.copy(codes, begun, meant, pairs)

  @pl.when(begin < end)
  def _() -> None:
    # JAX's floor division would want to know the chip.
    last = jax.lax.div(end + (plan.TURN - 1), plan.TURN)
    jax.lax.fori_loop(jax.lax.div(begin, plan.TURN), last, turn, None)
    for old, new in zip(numbers, results[2:], strict=True):
      _copy_numbers(slots, old, new, source[at])


def _copy_numbers(slots: Any, old: Any, new: Any, tile: Array) -> None:
  """Copies the numbers of the slots that lie in a tile."""
  shape = old.shape[-2:]
  lines = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  for line in range(new.shape[-2]):
    at = (0, 0, 0, pl.ds(line, 1), slice(None))
    inside = slots[at] - tile * (shape[0] * _LINE)
    here = (inside >= 0) & (inside < shape[0] * _LINE)
    place = jnp.broadcast_to(inside & (_LINE - 1), shape)
    found = jnp.take_along_axis(
      old[0, 0, 0], place, axis=1, mode="promise_in_bounds"
    )
    found = jnp.where(lines == inside >> _LINE_BITS, found, 0)
    found = jnp.sum(found, axis=0, keepdims=True)
    new[at] = jnp.where(here, found, new[at])
