"""Attention page by page, combined per KV head, in XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.attention import Partial
from kernels.attention.query_chunks import in_query_chunks


def paged_attention_xla(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B R P D"],
  values: Float[Array, "B R P D"],
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B R P"],
  heads: Int[Array, "B R"],
  kv_heads: int,
) -> Partial:
  """See `kernels.paged_attention.api.paged_attention`; O(G S R P) time.

  Queries come to the pages: a page gets copies of those that read its head,
  and no more of them at a time than it has slots.
  """
  held = (key_positions >= 0) & (heads >= 0)[..., None]
  # A slot that holds nothing may hold NaN, and 0 * NaN is NaN.
  values = jnp.where(held[..., None], values, jnp.zeros((), values.dtype))
  places = jnp.where(held, key_positions, -1)

  def attend(
    queries: Float[Array, "B K G C D"], query_positions: Int[Array, "B C"]
  ) -> Partial:
    return _attend(queries, keys, values, query_positions, places, heads)

  group = queries.shape[1] // kv_heads
  size = max(1, keys.shape[2] // group)
  return in_query_chunks(attend, queries, query_positions, kv_heads, size)


def _attend(
  queries: Float[Array, "B K G S D"],
  keys: Float[Array, "B R P D"],
  values: Float[Array, "B R P D"],
  query_positions: Int[Array, "B S"],
  places: Int[Array, "B R P"],
  heads: Int[Array, "B R"],
) -> Partial:
  logits = jnp.einsum(
    "brgsd,brpd->brgsp",
    _of_pages(queries, heads),
    keys,
    preferred_element_type=jnp.float32,
  )
  seen = (places[:, :, None] >= 0) & (
    places[:, :, None] <= query_positions[:, None, :, None]
  )
  scale = queries.shape[-1] ** -0.5
  logits = jnp.where(seen[:, :, None], logits * scale, -jnp.inf)

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
