"""Reference in float32: every head reads all pages and masks the others."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.quantized import Quantized, dequantize


def paged_attention_reference(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B R P D"] | Quantized,
  values: Float[Array, "B R P Dv"] | Quantized,
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B R P"],
  heads: Int[Array, "B R"],
  kv_heads: int,
  options: AttentionOptions = PLAIN,
) -> Partial:
  """Reference of `kvjax.kernels.paged_attention`, in O(N S R P) time."""
  keys, values = (dequantize(x, jnp.float32) for x in (keys, values))
  batch, query_heads, _, dim = queries.shape
  # Slots of all pages form one axis, and each has the owner of its page.
  owner = jnp.repeat(heads, keys.shape[2], axis=1)
  positions = key_positions.reshape(batch, -1)
  valid = (positions >= 0) & (owner >= 0)

  def flat(x: Float[Array, "B R P D"]) -> Float[Array, "B T D"]:
    x = x.astype(jnp.float32).reshape(batch, -1, x.shape[-1])
    return jnp.where(valid[..., None], x, 0.0)

  logits = jnp.einsum("bnsd,btd->bnst", queries.astype(jnp.float32), flat(keys))
  logits = options.cap(logits * options.scale_of(dim))
  kv_head = jnp.arange(query_heads, dtype=jnp.int32) // (
    query_heads // kv_heads
  )
  same_head = valid[:, None] & (owner[:, None] == kv_head[None, :, None])
  causal = options.visible(query_positions[..., None], positions[:, None])
  visible = same_head[:, :, None] & causal[:, None]
  weights = jax.nn.softmax(logits, axis=-1, where=visible)
  weights = jnp.where(visible, weights, 0.0)
  output = jnp.einsum("bnst,btd->bnsd", weights, flat(values))
  lse = jax.nn.logsumexp(logits, axis=-1, where=visible)
  return Partial(output.astype(queries.dtype), lse)
