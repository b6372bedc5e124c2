"""Attention by online softmax over chunks of slots, in XLA."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.attention.options import AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.attention.query_chunks import in_query_chunks
from kvjax.kernels.dispatch import target_platform
from kvjax.kernels.quantized import Quantized, dequantize

QUERY_CHUNK = 256
# Logits per head in memory at once: a single query reads all its slots in one
# chunk, a chunk of 256 queries reads 512 slots at a time.
LOGITS = 2**17
# Entries that a CPU copies at a time out of a stack of layers. Its matrix
# products take no slices, so a full layer would otherwise be in memory twice.
COPIED = 2**18
# Slots whose quantized keys and values are restored at once.
DEQUANTIZED = 2**12


class _Running(NamedTuple):
  """State of an online softmax: maximum, sum of exponentials, weighted sum."""

  largest: Float[Array, "B K G S"]
  total: Float[Array, "B K G S"]
  output: Float[Array, "B K G S Dv"]


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

  def attend(
    queries: Float[Array, "B K G C D"], query_positions: Int[Array, "B C"]
  ) -> Partial:
    return _attend(
      queries, keys, values, query_positions, key_positions, options, layer
    )

  return in_query_chunks(
    attend, queries, query_positions, keys.shape[2], QUERY_CHUNK
  )


def _attend(
  queries: Float[Array, "B K G S D"],
  keys: Float[Array, "L B K T D"] | Quantized,
  values: Float[Array, "L B K T Dv"] | Quantized,
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  options: AttentionOptions,
  layer: Int[Array, ""],
) -> Partial:
  slots = keys.shape[3]
  # At least 512, since no more than QUERY_CHUNK queries arrive at a time.
  size = min(slots, LOGITS // queries.shape[3])
  if isinstance(keys, Quantized) or isinstance(values, Quantized):
    size = min(size, DEQUANTIZED)
  if keys.shape[0] > 1 and target_platform() == "cpu":
    # Entries of one slot in all rows and KV heads, which are sliced together.
    slot = keys.shape[1] * keys.shape[2] * keys.shape[4]
    size = min(size, max(1, COPIED // slot))
  shape = queries.shape[:-1]
  # All rows skip a chunk together, so that the latest query of any row counts.
  last_query = jnp.max(query_positions)
  before_window = None
  if options.window is not None:
    before_window = _first(query_positions) - options.window

  def visit(running: _Running, index: Int[Array, ""]) -> tuple[_Running, None]:
    # The last chunk starts early enough to be full-sized. Slots that it shares
    # with the previous chunk are masked.
    start = jnp.minimum(index * size, slots - size)
    positions = jax.lax.dynamic_slice_in_dim(key_positions, start, size, 2)
    is_new = start + jnp.arange(size) >= index * size
    valid = (positions >= 0) & is_new[None, None]

    def chunk(
      x: Float[Array, "L B K T D"] | Quantized,
    ) -> Float[Array, "B K C D"]:
      part = jax.tree.map(functools.partial(_slice, layer, start, size), x)
      return dequantize(part, queries.dtype)

    def update(running: _Running) -> _Running:
      visible = valid[:, :, None] & options.visible(
        query_positions[:, None, :, None], positions[:, :, None]
      )
      value_chunk = chunk(values)
      # An empty slot may contain NaN, and 0 * NaN is NaN.
      value_chunk = jnp.where(
        valid[..., None], value_chunk, jnp.zeros((), value_chunk.dtype)
      )
      return _update(
        running, queries, chunk(keys), value_chunk, visible[:, :, None], options
      )

    if size == slots:
      return update(running), None
    # Skip chunks above the causal diagonal and chunks before the window of a
    # row's first query.
    in_reach = valid & (positions <= last_query)
    if before_window is not None:
      in_reach = in_reach & (positions > before_window[:, None, None])
    any_visible = jnp.any(in_reach)
    return jax.lax.cond(any_visible, update, lambda same: same, running), None

  running = _Running(
    jnp.full(shape, -jnp.inf, jnp.float32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros((*shape, values.shape[-1]), jnp.float32),
  )
  running, _ = jax.lax.scan(visit, running, jnp.arange(-(-slots // size)))
  return Partial.of(*running, queries.dtype)


def _slice(
  layer: Int[Array, ""],
  start: Int[Array, ""],
  size: int,
  x: Shaped[Array, "L B K T D"],
) -> Shaped[Array, "B K C D"]:
  """Slices slots of a layer at once, so that XLA makes at most one copy."""
  zero = jnp.zeros((), jnp.int32)
  where = (layer, zero, zero, start, zero)
  sizes = (1, *x.shape[1:3], size, x.shape[4])
  return jax.lax.dynamic_slice(x, where, sizes)[0]


def _first(query_positions: Int[Array, "B S"]) -> Int[Array, " B"]:
  """Returns each row's first position; the largest integer for padding."""
  never = jnp.iinfo(query_positions.dtype).max
  real = query_positions >= 0
  return jnp.min(jnp.where(real, query_positions, never), axis=1)


def _update(
  running: _Running,
  queries: Float[Array, "B K G S D"],
  keys: Float[Array, "B K C D"],
  values: Float[Array, "B K C Dv"],
  visible: Array,
  options: AttentionOptions,
) -> _Running:
  # NaN in empty keys needs no mask: the logits it reaches are replaced.
  logits = jnp.einsum(
    "bkgsd,bkcd->bkgsc", queries, keys, preferred_element_type=jnp.float32
  )
  logits = options.cap(logits * options.scale_of(queries.shape[-1]))
  logits = jnp.where(visible, logits, -jnp.inf)
  largest = jnp.maximum(running.largest, jnp.max(logits, axis=-1))
  # Until a key is visible, all are -inf, and -inf - -inf is NaN.
  finite = jnp.where(jnp.isfinite(largest), largest, 0.0)
  weights = jnp.exp(logits - finite[..., None])
  rescale = jnp.exp(running.largest - finite)
  weighted = jnp.einsum(
    "bkgsc,bkcd->bkgsd",
    # Products take the values' dtype; the sum of weights stays float32.
    weights.astype(values.dtype),
    values,
    preferred_element_type=jnp.float32,
  )
  return _Running(
    largest,
    running.total * rescale + jnp.sum(weights, axis=-1),
    running.output * rescale[..., None] + weighted,
  )
