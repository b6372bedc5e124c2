"""Attention by online softmax over chunks of slots, in XLA."""

import functools

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
# CPUs attend with 128 queries to 256 slots at a time: the logits then stay in
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
  def attend_rows(start: Int[Array, ""], rows: int) -> Partial:
    def of_rows(x: Shaped[Array, "B *X"]) -> Shaped[Array, "R *X"]:
      return jax.lax.dynamic_slice_in_dim(x, start, rows, 0)

    def attend(
      queries: Float[Array, "R K G C D"], positions: Int[Array, "R C"]
    ) -> Partial:
      slots = of_rows(key_positions)
      place = (layer, start)
      return _attend(queries, keys, values, positions, slots, options, place)

    size = QUERY_CHUNK
    if target_platform() == "cpu":
      size = min(size, CPU_QUERY_CHUNK)
    parts = of_rows(queries), of_rows(query_positions)
    return in_query_chunks(attend, *parts, keys.shape[2], size)

  batch = queries.shape[0]
  rows = _rows_at_once(keys)
  if rows == batch:
    return attend_rows(jnp.zeros((), jnp.int32), batch)
  starts = jnp.arange(0, batch, rows, dtype=jnp.int32)
  parts = jax.lax.map(lambda start: attend_rows(start, rows), starts)
  return jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), parts)


def _rows_at_once(keys: Float[Array, "L B K T D"] | Quantized) -> int:
  """Returns how many rows, a divisor of all, attend at once."""
  layers, batch, heads, slots, dim = keys.shape
  if layers == 1 or target_platform() != "cpu":
    return batch
  most = max(1, COPIED // (heads * slots * dim))
  return max(
    rows for rows in range(1, batch + 1) if batch % rows == 0 and rows <= most
  )


def _attend(
  queries: Float[Array, "B K G S D"],
  keys: Float[Array, "L R K T D"] | Quantized,
  values: Float[Array, "L R K T Dv"] | Quantized,
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  options: AttentionOptions,
  place: tuple[Int[Array, ""], Int[Array, ""]],
) -> Partial:
  """Attends to the slots of B rows, which begin at a place in L and R."""
  batch, kv_heads, group, length, dim = queries.shape
  queries, options = options.prescale(queries)
  queries = queries.reshape(batch, kv_heads, group * length, dim)
  query_positions = jnp.tile(query_positions, (1, group))
  slots = keys.shape[3]
  size = _slots_at_once(keys, batch, length)
  if isinstance(keys, Quantized) or isinstance(values, Quantized):
    size = min(size, DEQUANTIZED)
  # The rows of a device skip a chunk together, so that the latest query of any
  # of them counts.
  last_query = jnp.max(query_positions)
  before_window = None
  if options.window is not None:
    before_window = _first(query_positions) - options.window

  def visit(seen: Online, index: Int[Array, ""]) -> tuple[Online, None]:
    # The last chunk starts early enough to be full-sized. Slots that it shares
    # with the previous chunk are masked.
    start = jnp.minimum(index * size, slots - size)
    positions = jax.lax.dynamic_slice_in_dim(key_positions, start, size, 2)
    is_new = start + jnp.arange(size) >= index * size
    valid = (positions >= 0) & is_new[None, None]

    def chunk(
      x: Float[Array, "L B K T D"] | Quantized,
    ) -> Float[Array, "B K C D"]:
      part = jax.tree.map(
        functools.partial(_slice, place, batch, start, size), x
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

    if size == slots:
      return update(seen), None
    # Skip chunks above the causal diagonal and chunks before the window of a
    # row's first query.
    in_reach = valid & (positions <= last_query)
    if before_window is not None:
      in_reach = in_reach & (positions > before_window[:, None, None])
    any_visible = jnp.any(in_reach)
    return jax.lax.cond(any_visible, update, lambda same: same, seen), None

  seen = Online.none(queries.shape[:-1], values.shape[-1])
  seen, _ = jax.lax.scan(visit, seen, jnp.arange(-(-slots // size)))
  partial = seen.partial(queries.dtype)
  return jax.tree.map(
    lambda x: x.reshape(batch, kv_heads, group, length, *x.shape[3:]), partial
  )


def _slots_at_once(
  keys: Float[Array, "L R K T D"] | Quantized, batch: int, length: int
) -> int:
  """Returns how many slots of each row a chunk of `length` queries reads."""
  layers, _, heads, slots, dim = keys.shape
  # At least 256, since no more than QUERY_CHUNK queries arrive at a time.
  size = min(slots, LOGITS // length)
  if target_platform() != "cpu":
    return size
  if length > 1:
    size = min(size, CPU_LOGITS // length)
  if layers > 1:
    # Slots of all B rows and KV heads are copied together.
    size = min(size, max(1, COPIED // (batch * heads * dim)))
  # Equal chunks: the last one is full-sized, too, and masks what it repeats.
  return -(-slots // -(-slots // size))


def _slice(
  place: tuple[Int[Array, ""], Int[Array, ""]],
  rows: int,
  start: Int[Array, ""],
  size: int,
  x: Shaped[Array, "L R K T D"],
) -> Shaped[Array, "B K C D"]:
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
