"""Attention by online softmax over chunks of slots, in XLA."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.attention.online import Online
from kvjax.kernels.attention.options import AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.attention.query_chunks import in_query_chunks
from kvjax.kernels.dispatch import on_mesh, target_platform
from kvjax.kernels.quantized import Quantized, dequantize

QUERY_CHUNK = 256
# Logits per head in memory at once: a single query reads all its slots in one
# chunk, a chunk of 256 queries reads 512 slots at a time.
LOGITS = 2**17
# CPUs attend with 128 queries to 256 slots at most: the logits then stay in
# the processor's cache, which saves a tenth (4,096 tokens) to a third (896) of
# the time of 256 x 512 on an EPYC. A single query reads each slot once anyway.
CPU_QUERY_CHUNK = 128
CPU_LOGITS = 2**15
# Entries that a CPU copies at a time out of a stack of layers. Its matrix
# products take no slices, so a full layer would otherwise be in memory twice.
# Few rows with many slots are faster than many rows with few, whose sums are
# rescaled after every chunk.
COPIED = 2**19
# Slots whose quantized keys and values are restored at once.
DEQUANTIZED = 2**12


def attention_chunked(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "L B K T D"] | Quantized,
  values: Float[Array, "L B K T Dv"] | Quantized,
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  options: AttentionOptions,
  layer: Int[Array, ""],
) -> Partial:
  """Computes `api.partial_attention` in O(S + T) memory."""
  # Each device skips the chunks that its own rows and heads do not need.
  partial: Partial = on_mesh(
    functools.partial(_attend_in_chunks, options),
    (queries, keys, values, query_positions, key_positions, layer),
    ("BN", "LBK", "LBK", "B", "BK", ""),
    "BN",
  )
  return partial


def _attend_in_chunks(
  options: AttentionOptions,
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "L B K T D"] | Quantized,
  values: Float[Array, "L B K T Dv"] | Quantized,
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  layer: Int[Array, ""],
) -> Partial:
  def attend_rows(first_row: Int[Array, ""]) -> Partial:
    def of_rows(x: Shaped[Array, "B *X"]) -> Shaped[Array, "R *X"]:
      return jax.lax.dynamic_slice_in_dim(x, first_row, rows, 0)

    def attend(
      queries: Float[Array, "R K G C D"], positions: Int[Array, "R C"]
    ) -> Partial:
      slots = of_rows(key_positions)
      place = _Place(layer, first_row)
      return _attend(queries, keys, values, positions, slots, options, place)

    size = QUERY_CHUNK
    if target_platform() == "cpu":
      size = min(size, CPU_QUERY_CHUNK)
    parts = of_rows(queries), of_rows(query_positions)
    return in_query_chunks(attend, *parts, keys.shape[2], size)

  batch = queries.shape[0]
  rows = _rows_at_once(keys)
  if rows == batch:
    return attend_rows(jnp.zeros((), jnp.int32))
  starts = jnp.arange(0, batch, rows, dtype=jnp.int32)
  # The last rows begin early enough to be as many as the others.
  parts = jax.lax.map(attend_rows, jnp.minimum(starts, batch - rows))
  others = (len(starts) - 1) * rows

  def join(x: Float[Array, "C R *X"]) -> Float[Array, "B *X"]:
    joined = x.reshape(-1, *x.shape[2:])
    if len(joined) == batch:
      return joined
    return jnp.concatenate([joined[:others], joined[others - batch :]])

  return jax.tree.map(join, parts)


class _Place(NamedTuple):
  """Where the rows that attend at once begin in stacks of layers."""

  layer: Int[Array, ""]
  first_row: Int[Array, ""]


def _rows_at_once(keys: Float[Array, "L B K T D"] | Quantized) -> int:
  layers, batch, heads, slots, dim = keys.shape
  if layers == 1 or target_platform() != "cpu":
    return batch
  most = max(1, COPIED // (heads * slots * dim))
  return -(-batch // -(-batch // most))


def _attend(
  queries: Float[Array, "R K G S D"],
  keys: Float[Array, "L B K T D"] | Quantized,
  values: Float[Array, "L B K T Dv"] | Quantized,
  query_positions: Int[Array, "R S"],
  key_positions: Int[Array, "R K T"],
  options: AttentionOptions,
  place: _Place,
) -> Partial:
  rows, kv_heads, group, length, dim = queries.shape
  queries, options = options.prescale(queries)
  queries = queries.reshape(rows, kv_heads, group * length, dim)
  query_positions = jnp.tile(query_positions, (1, group))
  slots = keys.shape[3]
  size = slots
  if isinstance(keys, Quantized) or isinstance(values, Quantized):
    size = min(size, DEQUANTIZED)
  size = _slots_at_once(keys, size, rows, length)
  # The rows of a device skip a chunk, or its mask, together: the latest query
  # of any of them decides the one, the earliest the other. Padding is earlier
  # than all keys, so that it needs the mask.
  first_query, last_query = jnp.min(query_positions), jnp.max(query_positions)
  before_window = None
  if options.window is not None:
    before_window = _first(query_positions) - options.window

  def visit(seen: Online, index: Int[Array, ""]) -> tuple[Online, None]:
    # The last chunk starts early enough to be full-sized. Slots that it shares
    # with the previous chunk are masked.
    start = jnp.minimum(index * size, slots - size)
    positions = jax.lax.dynamic_slice_in_dim(key_positions, start, size, 2)
    is_new = start + jnp.arange(size, dtype=jnp.int32) >= index * size
    valid = (positions >= 0) & is_new[None, None]

    def chunk(
      x: Float[Array, "L B K T D"] | Quantized,
    ) -> Float[Array, "R K C D"]:
      part = jax.tree.map(
        functools.partial(_slice, place, rows, start, size), x
      )
      return dequantize(part, queries.dtype)

    def update(seen: Online) -> Online:
      visible = valid[:, :, None] & options.visible(
        query_positions[:, None, :, None], positions[:, :, None]
      )
      value_chunk = chunk(values)
      # An empty slot may contain NaN, and 0 * NaN is NaN.
      value_chunk = jnp.where(
        valid[..., None], value_chunk, jnp.zeros((), value_chunk.dtype)
      )
      return seen.after(queries, chunk(keys), value_chunk, visible, options)

    def update_unmasked(seen: Online) -> Online:
      return seen.after(queries, chunk(keys), chunk(values), None, options)

    if size == slots:
      return update(seen), None
    # Skip chunks above the causal diagonal and chunks before the window of a
    # row's first query.
    in_reach = valid & (positions <= last_query)
    if before_window is not None:
      in_reach = in_reach & (positions > before_window[:, None, None])
    # Most chunks below the diagonal need no mask; without one, 5,120 tokens
    # take 7 % less time on a Xeon.
    visible_to_all = (
      valid
      & options.visible(first_query, positions)
      & options.visible(last_query, positions)
    )
    # 0: no query sees a slot; 1: some do; 2: every query sees every slot.
    some_and_all = jnp.stack([jnp.any(in_reach), jnp.all(visible_to_all)])
    branch = jnp.sum(some_and_all, dtype=jnp.int32)
    branches = [lambda same: same, update, update_unmasked]
    return jax.lax.switch(branch, branches, seen), None

  seen = Online.none(queries.shape[:-1], values.shape[-1])
  seen, _ = jax.lax.scan(
    visit, seen, jnp.arange(-(-slots // size), dtype=jnp.int32)
  )
  partial = seen.partial(queries.dtype)
  return jax.tree.map(
    lambda x: x.reshape(rows, kv_heads, group, length, *x.shape[3:]), partial
  )


def _slots_at_once(
  keys: Float[Array, "L B K T D"] | Quantized, most: int, rows: int, length: int
) -> int:
  """Returns how many slots `length` queries of each of some rows read at once.

  Args:
    keys: the keys.
    most: the most slots that are possible.
    rows: number of the rows.
    length: number of queries per head, at most QUERY_CHUNK.
  """
  layers, _, heads, slots, dim = keys.shape
  size = min(most, LOGITS // length)
  if target_platform() != "cpu":
    return size
  if length > 1:
    size = min(size, CPU_LOGITS // length)
  if layers > 1:
    # Slots of all rows and KV heads are copied together.
    size = min(size, max(1, COPIED // (rows * heads * dim)))
  # Equal chunks: the last one is full-sized, too, and masks what it repeats.
  return -(-slots // -(-slots // size))


def _slice(
  place: _Place,
  rows: int,
  start: Int[Array, ""],
  size: int,
  x: Shaped[Array, "L B K T D"],
) -> Shaped[Array, "R K C D"]:
  """Slices slots of a layer at once, so that XLA makes at most one copy."""
  zero = jnp.zeros((), jnp.int32)
  where = (*place, zero, start, zero)
  sizes = (1, rows, x.shape[2], size, x.shape[4])
  return jax.lax.dynamic_slice(x, where, sizes)[0]


def _first(query_positions: Int[Array, "B S"]) -> Int[Array, " B"]:
  """Returns each row's first position; the largest integer for padding."""
  never = jnp.iinfo(query_positions.dtype).max
  real = query_positions >= 0
  return jnp.min(jnp.where(real, query_positions, never), axis=1)
