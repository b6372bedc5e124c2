"""Attention page by page, combined per KV head, in XLA."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention import Partial, merge
from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.query_chunks import in_query_chunks
from kvjax.kernels.quantized import Quantized, dequantize
from kvjax.kernels.stacks import index_stack

# Slots whose keys and values are made whole at once, if they are quantized.
WHOLE = 2**12


class Pages(NamedTuple):
  """R pages of P slots; see `kvjax.kernels.paged_attention.api`."""

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
) -> Partial:
  """See `kvjax.kernels.paged_attention.api.paged_attention`; O(G S R P) time.

  Queries come to the pages: a page gets copies of those that read its head,
  and no more of them at a time than it has slots. Quantized pages are made
  whole a few at a time.
  """
  keys, values = index_stack((keys, values), layer)
  pages = Pages(keys, values, key_positions, heads)
  some = isinstance(keys, Quantized) or isinstance(values, Quantized)

  def attend(
    queries: Float[Array, "B K G C D"], query_positions: Int[Array, "B C"]
  ) -> Partial:
    run = _attend_in_turn if some else _attend
    return run(queries, query_positions, pages, options)

  group = queries.shape[1] // kv_heads
  size = max(1, keys.shape[2] // group)
  return in_query_chunks(attend, queries, query_positions, kv_heads, size)


def _attend_in_turn(
  queries: Float[Array, "B K G S D"],
  query_positions: Int[Array, "B S"],
  pages: Pages,
  options: AttentionOptions,
) -> Partial:
  count = pages.heads.shape[1]
  size = min(count, max(1, WHOLE // pages.positions.shape[2]))

  def visit(found: Partial, index: Int[Array, ""]) -> tuple[Partial, None]:
    # The last pages start early enough to be as many; those that were there
    # before have no head now.
    start = jnp.minimum(index * size, count - size)
    part = jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, 1), pages
    )
    fresh = start + jnp.arange(size) >= index * size
    part = part._replace(heads=jnp.where(fresh[None], part.heads, -1))
    some = _attend(whole, query_positions, part, options)
    return merge(found, some), None

  whole = queries.astype(jnp.float32)
  none = Partial(
    jnp.zeros((*whole.shape[:-1], pages.values.shape[-1]), jnp.float32),
    jnp.full(whole.shape[:-1], -jnp.inf, jnp.float32),
  )
  found, _ = jax.lax.scan(visit, none, jnp.arange(-(-count // size)))
  return Partial(found.output.astype(queries.dtype), found.lse)


def _attend(
  queries: Float[Array, "B K G S D"],
  query_positions: Int[Array, "B S"],
  pages: Pages,
  options: AttentionOptions,
) -> Partial:
  keys, values = (dequantize(x, queries.dtype) for x in pages[:2])
  positions, heads = pages[2:]
  valid = (positions >= 0) & (heads >= 0)[..., None]
  # A slot that holds nothing may hold NaN, and 0 * NaN is NaN.
  values = jnp.where(valid[..., None], values, jnp.zeros((), values.dtype))
  places = jnp.where(valid, positions, -1)
  logits = jnp.einsum(
    "brgsd,brpd->brgsp",
    _of_pages(queries, heads),
    keys,
    preferred_element_type=jnp.float32,
  )
  seen = (places[:, :, None] >= 0) & options.visible(
    query_positions[:, None, :, None], places[:, :, None]
  )
  logits = options.capped(logits * options.scale_of(queries.shape[-1]))
  logits = jnp.where(seen[:, :, None], logits, -jnp.inf)

  owns = heads[..., None] == jnp.arange(queries.shape[1])[None, None]
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
    """Sums over the pages of each head, in an order that is always the same."""
    return jnp.einsum(
      "brk,brgs...->bkgs...",
      owns.astype(jnp.float32),
      x,
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
  """For every page what belongs to its head; an unused page gets anything."""
  return jax.vmap(lambda row, own: row[own])(x, jnp.maximum(heads, 0))
