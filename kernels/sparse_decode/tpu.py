"""Attention to listed slots on TPUs, copied one by one or in whole pages."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels import tuning
from kvjax.kernels.attention.options import (
  PLAIN,
  AttentionOptions,
  decline_unless_plain,
)
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.attention.running import Running
from kvjax.kernels.quantized import Quantized, stored
from kvjax.kernels.sparse_decode.lists import Lists

# Facts of the hardware: lanes of a register, and rows in a tile of the widest
# packing, int8.
LANES = 128
ROWS = 32
# Maximum length of a list: two lists must fit into scalar memory.
MAX_SLOTS = 2**15
DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "int8")))


class _Operands(NamedTuple):
  """Inputs of the kernel, as arrays or refs.

  Attributes:
    layer: index of the layer in the stacks, prefetched, [1].
    counts: entries of each list, prefetched, [B H].
    queries: queries of each list, [B, H, G, D].
    numbers: first slots to fetch, for the scalar unit, [B H, 1, M / page].
    lists: the other fields of `Lists`, for the vector units.
    keys: all keys, in HBM, [L, B, K, T, D].
    values: all values, in HBM, [L, B, K, T, D].
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
  logits: Float[Array, "B N M"] | None,
  layer: Int[Array, ""],
  options: AttentionOptions = PLAIN,
  page: int = 1,
) -> Partial:
  """Pallas kernel for `kvjax.kernels.sparse_decode.sparse_decode`.

  The smallest copy is a row of 32-bit words: one row of float32, two adjacent
  rows of bfloat16 or four of int8. The kernel therefore copies twice the bytes
  of bfloat16 slots and four times those of int8, for every T. Whole tiles would
  be 8 and 32 times as many bytes. A page of whole words is one copy, of its own
  bytes only. Entries after the last listed slot are skipped. XLA gathers the
  scales.

  Rows are padded to a multiple of 128 lanes, so that D = 64 takes the memory
  and time of 128. If T is odd, the last word ends in the padding of the last
  tile. Keys and values that are arguments of the compiled program are copied
  once if T is not a multiple of 8 or D not of 128, since their layout differs;
  XLA's gather also copies narrow ones.

  Raises:
    NotImplementedError: T is less than 32; a list is empty or too long; the
      dtype is not float32, bfloat16 or int8; attention is not plain.
  """
  del logits
  decline_unless_plain(options, keys.shape[-1], values.shape[-1])
  batch, heads, dim = queries.shape
  lists, num_slots = slots.shape[1:]
  if not 0 < num_slots <= MAX_SLOTS:
    raise NotImplementedError(f"Lists of {num_slots} slots do not fit.")
  dtypes = {stored(x).dtype for x in (keys, values)}
  if len(dtypes) > 1 or not dtypes.issubset(DTYPES):
    raise NotImplementedError(f"No rows of {dtypes} are read.")
  if keys.shape[3] < ROWS:
    raise NotImplementedError(f"{keys.shape[3]} rows do not fill a tile.")

  # Slots that are prefetched while the previous ones are attended to.
  chunk = tuning.option("sparse_decode/tpu", "chunk")
  chunk = min(chunk, -(-num_slots // LANES) * LANES)
  if page % _packed(*dtypes) or chunk % page or page > keys.shape[3]:
    page = 1
  chunked = Lists.of(
    keys, values, layer, slots, bias, chunk, -(-num_slots // chunk)
  )
  results = _call(
    _Operands(
      layer[None],
      chunked.counts.reshape(-1),
      queries.reshape(batch, lists, heads // lists, dim),
      _first_slots(chunked.slots.reshape(batch * lists, 1, -1, page)),
      chunked[1:],
      stored(keys),
      stored(values),
    ),
    page,
  )
  largest, total, weighted = (x.reshape(batch, heads, -1) for x in results)
  return Partial.of(largest[..., 0], total[..., 0], weighted, queries.dtype)


def _first_slots(slots: Int[Array, "L 1 P p"]) -> Int[Array, "L 1 P"]:
  """First slot of each page; 0 for pages of which no slot is listed."""
  page = slots.shape[-1]
  return jnp.maximum(jnp.max(slots, axis=-1), 0) // page * page


def _call(
  operands: _Operands, page: int
) -> tuple[Float[Array, "B H G _"], ...]:
  batch, lists, group, dim = operands.queries.shape
  dtype = operands.keys.dtype
  chunk = operands.lists[0].shape[-1]

  def of_list(x: Any) -> pl.BlockSpec:
    rest = x.shape[2:]
    return pl.BlockSpec(
      (1, 1, *rest), lambda b, h, *_: (b, h, *(0 for _ in rest))
    )

  # The kernel itself copies rows: a BlockSpec would fetch whole tiles.
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
  copied = max(page, _packed(dtype))
  rows = pltpu.VMEM((2, chunk // page * copied, dim), dtype)
  unroll = tuning.option("sparse_decode/tpu", "unroll")
  call = pl.pallas_call(
    functools.partial(
      _kernel,
      share=lists // operands.keys.shape[2],
      page=page,
      unroll=math.gcd(unroll, chunk // page),
    ),
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
      # No prefetch crosses lists, so their order does not matter.
      dimension_semantics=("parallel", "parallel"),
      # Bounds checks take longer than starting a copy; all slots are valid.
      disable_bounds_checks=True,
    ),
    cost_estimate=_cost(operands, shapes, copied),
    name="sparse_decode",
  )
  return tuple(call(*operands))


def _cost(
  operands: _Operands, results: tuple[jax.ShapeDtypeStruct, ...], copied: int
) -> pl.CostEstimate:
  """Cost estimate for the compiler, if all entries are slots.

  Args:
    operands: the operands.
    results: shapes of the results.
    copied: rows per copy.
  """
  _, _, group, dim = operands.queries.shape
  entries = operands.lists[0].size
  blocks = jax.tree.leaves((operands[:5], results))
  row = operands.keys.dtype.itemsize * -(-dim // LANES) * LANES
  moved = 2 * operands.numbers.size * copied * row
  return pl.CostEstimate(
    flops=4 * entries * group * dim,
    transcendentals=entries * group,
    bytes_accessed=moved + sum(x.size * x.dtype.itemsize for x in blocks),
  )


def _packed(dtype: DTypeLike) -> int:
  """Number of rows that share 32-bit words."""
  return 4 // jnp.dtype(dtype).itemsize


def _kernel(*refs: Any, share: int, page: int, unroll: int) -> None:
  """Attends to a list, prefetching one chunk.

  Args:
    *refs: `_Operands`, then `Running`, then rows of keys and of values in two
      buffers and the semaphores of the buffers.
    share: number of lists per KV head.
    page: entries per copy.
    unroll: copies started per iteration, so that their scalar work overlaps; a
      divisor of those of a chunk.
  """
  read, running_refs = _Operands(*refs[:7]), refs[7:10]
  *rows, arrived = refs[10:]
  layer = read.layer[0]
  batch, head = pl.program_id(0), pl.program_id(1)
  count = read.counts[batch * pl.num_programs(1) + head]
  kv_head = jax.lax.div(head, share)
  chunk = read.lists[0].shape[-1]
  # Rows of one copy: a page, or those that share words with a slot.
  copied = max(page, _packed(read.keys.dtype))

  def num_groups(number: Array) -> Array:
    # 0 beyond the last chunk: then nothing is fetched or waited for.
    remaining = jnp.clip(count - number * chunk, 0, chunk)
    entries = unroll * page
    return jax.lax.div(remaining + entries - 1, entries)

  def part(of: Any, number: Array, group: Array) -> Any:
    size = unroll * copied
    return of.at[number & 1, pl.ds(pl.multiple_of(group * size, size), size)]

  def fetch(number: Array) -> None:
    def start_copies(group: Array, _: None) -> None:
      for entry in range(unroll):
        place = number * (chunk // page) + group * unroll + entry
        slot = read.numbers[0, 0, place]
        # Rows that share words are a power of two; a page starts where it does.
        first = slot if page > 1 else slot & -copied
        source = pl.ds(pl.multiple_of(first, copied), copied)
        target = pl.ds(entry * copied, copied)
        for source_rows, buffer in zip(
          (read.keys, read.values), rows, strict=True
        ):
          pltpu.make_async_copy(
            source_rows.at[layer, batch, kv_head, source],
            part(buffer, number, group).at[target],
            arrived.at[number & 1],
          ).start()

    jax.lax.fori_loop(0, num_groups(number), start_copies, None)

  def wait(number: Array) -> None:
    def wait_for_copies(group: Array, _: None) -> None:
      for buffer in rows:
        # A semaphore counts bytes, so that one wait serves many copies.
        copied = part(buffer, number, group)
        pltpu.make_async_copy(copied, copied, arrived.at[number & 1]).wait()

    jax.lax.fori_loop(0, num_groups(number), wait_for_copies, None)

  def attend(number: Array, running: Running) -> Running:
    # The other buffer was used by the previous iteration, which is over.
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
  for ref, value in zip(running_refs, running, strict=True):
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
    _unpack_rows(keys, slots, dtype),
    _unpack_rows(values, slots, dtype),
    slots >= 0,
    *adjustments,
  )


def _unpack_rows(
  rows: Shaped[Array, "R D"], slots: Int[Array, "1 c"], dtype: DTypeLike
) -> Float[Array, "c D"]:
  """Unpacks the listed rows, from words that several rows share if R > c."""
  slot = jnp.transpose(slots)
  if rows.shape[0] == slot.shape[0]:
    # Rows that were not fetched may be NaN, and 0 * NaN is NaN.
    return jnp.where(slot >= 0, rows.astype(jnp.float32), 0.0).astype(dtype)
  # Now [c, D]: a row of words for every entry, lowest row in the lowest bits.
  words = pltpu.bitcast(rows, jnp.int32)
  rest = 32 - 8 * rows.dtype.itemsize
  before = (slot & (_packed(rows.dtype) - 1)) * (32 - rest)
  # Shift the row to the top of the word, then back to drop the others.
  words = jnp.where(slot >= 0, words << (rest - before), 0) >> rest
  if rows.dtype == jnp.int8:
    return words.astype(jnp.float32).astype(dtype)
  # A bfloat16 is the upper half of a float32.
  return jax.lax.bitcast_convert_type(words << rest, jnp.float32).astype(dtype)
