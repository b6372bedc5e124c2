"""Attention to listed slots on TPUs: each is fetched by a copy of its own."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.attention.options import (
  PLAIN,
  AttentionOptions,
  decline_unless_plain,
)
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.attention.running import Running
from kvjax.kernels.quantized import Quantized, stored
from kvjax.kernels.sparse_decode.lists import Lists

# Slots that are fetched while those before them are attended to.
CHUNK = 256
# Copies started in a row, so that the scalar work of one hides another's.
UNROLL = 8
LANES = 128
# Of a tile of the widest packing, int8.
ROWS = 32
# Two lists must fit into scalar memory.
MOST = 2**15
DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "int8")))


class _Operands(NamedTuple):
  """What the kernel reads: arrays or refs.

  Attributes:
    layer: of the stacks, known before the kernel starts, [1].
    counts: entries of each list, likewise, [B H].
    queries: of each list, [B, H, G, D].
    numbers: slots to fetch, for the scalar unit, [B H, 1, M].
    lists: the rest of `Lists`, for the vector units.
    keys: all of them, where they are, [L, B, K, T, D].
    values: likewise.
  """

  layer: Any
  counts: Any
  queries: Any
  numbers: Any
  lists: Any
  keys: Any
  values: Any


def sparse_decode_tpu(
  queries: Float[Array, "B N D"],
  keys: Float[Array, "L B K T D"] | Quantized,
  values: Float[Array, "L B K T Dv"] | Quantized,
  slots: Int[Array, "B H M"],
  bias: Float[Array, "B N M"] | None,
  layer: Int[Array, ""],
  options: AttentionOptions = PLAIN,
) -> Partial:
  """See `kvjax.kernels.sparse_decode.api.sparse_decode`.

  The least that can be copied is a row of 32-bit words: one row of float32,
  two neighboring rows of bfloat16 or four of int8. So the kernel moves twice
  the bytes that bfloat16 slots hold and four times those of int8, whatever T
  is (their tiles would be 8 and 32 times as many), and nothing for entries
  after the last that names a slot. XLA gathers the scales.

  Rows are kept, and copied, with lanes up to a multiple of 128: 64 entries take
  the place and the time of 128. Where T is odd, the last word ends in the
  padding of the last tile. Keys and values that come from outside the compiled
  program are copied once before if T is no multiple of 8 or D none of 128,
  since such arrays come in another order; XLA's gather copies narrow ones too.

  Raises:
    NotImplementedError: T is less than 32; a list is empty or too long; keys
      and values are of other dtypes than the above; attention is not plain.
  """
  decline_unless_plain(options, keys.shape[-1], values.shape[-1])
  batch, heads, dim = queries.shape
  lists, most = slots.shape[1:]
  if not 0 < most <= MOST:
    raise NotImplementedError(f"Lists of {most} slots do not fit.")
  dtypes = {stored(x).dtype for x in (keys, values)}
  if len(dtypes) > 1 or not dtypes.issubset(DTYPES):
    raise NotImplementedError(f"No rows of {dtypes} are read.")
  if keys.shape[3] < ROWS:
    raise NotImplementedError(f"{keys.shape[3]} rows do not fill a tile.")

  chunk = min(CHUNK, -(-most // LANES) * LANES)
  cut = Lists.of(keys, values, layer, slots, bias, chunk, -(-most // chunk))
  found = _call(
    _Operands(
      layer[None],
      cut.counts.reshape(-1),
      queries.reshape(batch, lists, heads // lists, dim),
      cut.numbers.reshape(batch * lists, 1, -1),
      cut[2:],
      stored(keys),
      stored(values),
    )
  )
  largest, total, weighted = (x.reshape(batch, heads, -1) for x in found)
  return Partial.of(largest[..., 0], total[..., 0], weighted, queries.dtype)


def _call(operands: _Operands) -> tuple[Float[Array, "B H G _"], ...]:
  batch, lists, group, dim = operands.queries.shape
  dtype = operands.keys.dtype
  chunk = operands.lists[0].shape[-1]

  def of_list(x: Any) -> pl.BlockSpec:
    rest = x.shape[2:]
    return pl.BlockSpec(
      (1, 1, *rest), lambda b, h, *_: (b, h, *(0 for _ in rest))
    )

  everything = pl.BlockSpec(memory_space=pltpu.HBM)
  numbers = pl.BlockSpec(
    (1, *operands.numbers.shape[1:]),
    lambda b, h, *_: (b * lists + h, 0, 0),
    memory_space=pltpu.SMEM,
  )
  shapes = tuple(
    jax.ShapeDtypeStruct((batch, lists, group, width), jnp.float32)
    for width in (1, 1, dim)
  )
  rows = pltpu.VMEM((2, chunk * _packed(dtype), dim), dtype)
  call = pl.pallas_call(
    functools.partial(_kernel, share=lists // operands.keys.shape[2]),
    out_shape=shapes,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(batch, lists),
      in_specs=(
        of_list(operands.queries),
        numbers,
        jax.tree.map(of_list, operands.lists),
        everything,
        everything,
      ),
      out_specs=tuple(map(of_list, shapes)),
      scratch_shapes=(rows, rows, pltpu.SemaphoreType.DMA((2,))),
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel"),
      # They take longer than starting a copy does, and no slot is outside.
      disable_bounds_checks=True,
    ),
    cost_estimate=_cost(operands, shapes),
    name="sparse_decode",
  )
  return tuple(call(*operands))


def _cost(
  operands: _Operands, results: tuple[jax.ShapeDtypeStruct, ...]
) -> pl.CostEstimate:
  """What the compiler plans with: all entries name slots."""
  _, _, group, dim = operands.queries.shape
  entries = operands.numbers.size
  blocks = jax.tree.leaves((operands[:5], results))
  row = operands.keys.dtype.itemsize * -(-dim // LANES) * LANES
  copied = 2 * entries * _packed(operands.keys.dtype) * row
  return pl.CostEstimate(
    flops=4 * entries * group * dim,
    transcendentals=entries * group,
    bytes_accessed=copied + sum(x.size * x.dtype.itemsize for x in blocks),
  )


def _packed(dtype: DTypeLike) -> int:
  """Rows that share 32-bit words."""
  return 4 // jnp.dtype(dtype).itemsize


def _kernel(*refs: Any, share: int) -> None:
  """Attends to a list; its chunks are fetched one ahead.

  Args:
    *refs: `_Operands`, then `Running`, then rows of keys and of values in two
      buffers and the semaphores of the buffers.
    share: lists that read the same KV head.
  """
  read, found = _Operands(*refs[:7]), refs[7:10]
  *rows, arrived = refs[10:]
  layer = read.layer[0]
  batch, head = pl.program_id(0), pl.program_id(1)
  count = read.counts[batch * pl.num_programs(1) + head]
  kv_head = jax.lax.div(head, share)
  packed = _packed(read.keys.dtype)
  chunk = read.lists[0].shape[-1]

  def groups(number: Array) -> Array:
    left = jnp.clip(count - number * chunk, 0, chunk)
    return jax.lax.div(left + UNROLL - 1, UNROLL)

  def part(of: Any, number: Array, group: Array) -> Any:
    size = UNROLL * packed
    return of.at[number & 1, pl.ds(pl.multiple_of(group * size, size), size)]

  def fetch(number: Array) -> None:
    def some(group: Array, _: None) -> None:
      for entry in range(UNROLL):
        slot = read.numbers[0, 0, number * chunk + group * UNROLL + entry]
        source = pl.ds(pl.multiple_of(slot & -packed, packed), packed)
        target = pl.ds(entry * packed, packed)
        for whole, to in zip((read.keys, read.values), rows, strict=True):
          pltpu.make_async_copy(
            whole.at[layer, batch, kv_head, source],
            part(to, number, group).at[target],
            arrived.at[number & 1],
          ).start()

    jax.lax.fori_loop(0, groups(number), some, None)

  def wait(number: Array) -> None:
    def some(group: Array, _: None) -> None:
      for to in rows:
        # A semaphore counts bytes, so that one wait serves many copies.
        same = part(to, number, group)
        pltpu.make_async_copy(same, same, arrived.at[number & 1]).wait()

    jax.lax.fori_loop(0, groups(number), some, None)

  def attend(number: Array, running: Running) -> Running:
    fetch(number + 1)
    wait(number)
    keys, values = (x[number & 1] for x in rows)
    lists: list[Any] = [
      None if x is None else x[0, 0, number] for x in read.lists
    ]
    return _attend(running, read.queries[0, 0], keys, values, *lists)

  fetch(jnp.int32(0))
  running = Running.none(*read.queries.shape[2:])
  chunks = jax.lax.div(count + chunk - 1, chunk)
  running = jax.lax.fori_loop(0, chunks, attend, running)
  for ref, value in zip(found, running, strict=True):
    ref[0, 0] = value


def _attend(
  running: Running,
  queries: Float[Array, "G D"],
  keys: Shaped[Array, "R D"],
  values: Shaped[Array, "R D"],
  slots: Int[Array, "1 c"],
  *adjustments: Float[Array, "#G c"] | None,
) -> Running:
  # Quantized rows are multiplied in the precision of the queries.
  dtype = queries.dtype if keys.dtype == jnp.int8 else keys.dtype
  return running.after(
    queries,
    _own(keys, slots, dtype),
    _own(values, slots, dtype),
    slots >= 0,
    *adjustments,
  )


def _own(
  rows: Shaped[Array, "R D"], slots: Int[Array, "1 c"], dtype: DTypeLike
) -> Float[Array, "c D"]:
  """Of rows that came together those that are listed; zeros for nothing."""
  slot = jnp.transpose(slots)
  if rows.dtype == jnp.float32:
    return jnp.where(slot >= 0, rows, 0.0)
  words = pltpu.bitcast(rows, jnp.int32)
  rest = 32 - 8 * rows.dtype.itemsize
  before = (slot & (_packed(rows.dtype) - 1)) * (32 - rest)
  # To the top of the word, and what is below it cut off.
  words = jnp.where(slot >= 0, words << (rest - before), 0) >> rest
  if rows.dtype == jnp.int8:
    return words.astype(jnp.float32).astype(dtype)
  return jax.lax.bitcast_convert_type(words << rest, jnp.float32).astype(dtype)
