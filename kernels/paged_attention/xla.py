"""Attention page by page, merged per KV head, in XLA."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.partial import Partial, merge
from kvjax.kernels.attention.query_chunks import in_query_chunks
from kvjax.kernels.paged_attention.spans import Span, Window
from kvjax.kernels.quantized import Quantized, dequantize
from kvjax.kernels.stacks import index_stack

# Maximum number of slots that are dequantized at a time.
MAX_DEQUANTIZED = 2**12


class Pages(NamedTuple):
  """R pages of P slots, as the arguments of `paged_attention`."""

  keys: Float[Array, "B R P D"] | Quantized
  values: Float[Array, "B R P Dv"] | Quantized
  positions: Int[Array, "B R P"]
  heads: Int[Array, "B R"]


def paged_attention_xla(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "L B R P D"] | Quantized,
  values: Float[Array, "L B R P Dv"] | Quantized,
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B R P"],
  heads: Int[Array, "B R"],
  layer: Int[Array, ""],
  kv_heads: int,
  options: AttentionOptions = PLAIN,
  span: Span | None = None,
) -> Partial:
  """XLA version of `kvjax.kernels.paged_attention.paged_attention`.

  It takes O(G S R P) time. Every page gets a copy of the queries of its head,
  at most as many at a time as it has slots. Quantized pages are dequantized a
  few at a time. XLA copies the pages of a span, as it does a layer of a stack,
  before it multiplies.
  """
  keys, values = index_stack((keys, values), layer)
  pages = Pages(keys, values, key_positions, heads)
  if window := Window.of(heads, span):
    pages = window.take(pages)
  quantized = isinstance(keys, Quantized) or isinstance(values, Quantized)

  def attend(
    queries: Float[Array, "B K G C D"], query_positions: Int[Array, "B C"]
  ) -> Partial:
    run = _attend_in_parts if quantized else _attend
    return run(queries, query_positions, pages, options)

  group = queries.shape[1] // kv_heads
  size = max(1, keys.shape[2] // group)
  return in_query_chunks(attend, queries, query_positions, kv_heads, size)


def _attend_in_parts(
  queries: Float[Array, "B K G S D"],
  query_positions: Int[Array, "B S"],
  pages: Pages,
  options: AttentionOptions,
) -> Partial:
  count = pages.heads.shape[1]
  size = min(count, max(1, MAX_DEQUANTIZED // pages.positions.shape[2]))

  def visit(partial: Partial, index: Int[Array, ""]) -> tuple[Partial, None]:
    # All parts have the same size, so the last one may overlap the one before;
    # pages that were read before are masked.
    start = jnp.minimum(index * size, count - size)
    part = jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, 1), pages
    )
    unread = start + jnp.arange(size, dtype=jnp.int32) >= index * size
    part = part._replace(heads=jnp.where(unread[None], part.heads, -1))
    update = _attend(queries_f32, query_positions, part, options)
    return merge(partial, update), None

  # `merge` rounds to this dtype, which must not happen after every part.
  queries_f32 = queries.astype(jnp.float32)
  empty = Partial(
    jnp.zeros((*queries_f32.shape[:-1], pages.values.shape[-1]), jnp.float32),
    jnp.full(queries_f32.shape[:-1], -jnp.inf, jnp.float32),
  )
  partial, _ = jax.lax.scan(
    visit, empty, jnp.arange(-(-count // size), dtype=jnp.int32)
  )
  return Partial(partial.output.astype(queries.dtype), partial.lse)


def _attend(
  queries: Float[Array, "B K G S D"],
  query_positions: Int[Array, "B S"],
  pages: Pages,
  options: AttentionOptions,
) -> Partial:
  keys, values = (dequantize(x, queries.dtype) for x in pages[:2])
  positions, heads = pages[2:]
  # An unused page gathers the queries of some head; all its slots are masked.
  valid = (positions >= 0) & (heads >= 0)[..., None]
  # Empty slots may contain NaN, and 0 * NaN is NaN.
  values = jnp.where(valid[..., None], values, jnp.zeros((), values.dtype))
  valid_positions = jnp.where(valid, positions, -1)
  logits = jnp.einsum(
    "brgsd,brpd->brgsp",
    _of_pages(queries, heads),
    keys,
    preferred_element_type=jnp.float32,
  )
  visible = (valid_positions[:, :, None] >= 0) & options.visible(
    query_positions[:, None, :, None], valid_positions[:, :, None]
  )
  logits = options.cap(logits * options.scale_of(queries.shape[-1]))
  logits = jnp.where(visible[:, :, None], logits, -jnp.inf)

  # All pages of a head share one maximum, so that their sums just add up.
  owns = (
    heads[..., None]
    == jnp.arange(queries.shape[1], dtype=jnp.int32)[None, None]
  )
  largest = jnp.where(
    owns[..., None, None], jnp.max(logits, axis=-1)[:, :, None], -jnp.inf
  )
  largest = jnp.max(largest, axis=1)
  shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
  weights = jnp.exp(logits - _of_pages(shift, heads)[..., None])
  weighted = jnp.einsum(
    "brgsp,brpd->brgsd",
    weights.astype(values.dtype),
    values,
    preferred_element_type=jnp.float32,
  )

  def of_heads(x: Float[Array, "B R G S *D"]) -> Float[Array, "B K G S *D"]:
    """Sums over the pages of each head, deterministically."""
    return jnp.einsum(
      "brk,brgs...->bkgs...",
      owns.astype(jnp.float32),
      x,
      # By default, TPUs would round the float32 sums to bfloat16.
      precision=jax.lax.Precision.HIGHEST,
    )

  return Partial.of(
    largest,
    of_heads(jnp.sum(weights, axis=-1)),
    of_heads(weighted),
    queries.dtype,
  )


def _of_pages(
  x: Float[Array, "B K *S"], heads: Int[Array, "B R"]
) -> Float[Array, "B R *S"]:
  """Gathers the values of every page's head; arbitrary for unused pages."""
  return jax.vmap(lambda row, head: row[head])(x, jnp.maximum(heads, 0))
