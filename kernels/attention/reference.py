"""Reference attention in float32 with all logits in memory."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.options import AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.quantized import Quantized, dequantize
from kvjax.kernels.stacks import index_stack


def attention_reference(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "L B K T D"] | Quantized,
  values: Float[Array, "L B K T Dv"] | Quantized,
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  options: AttentionOptions,
  layer: Int[Array, ""],
) -> Partial:
  """Computes `api.partial_attention` in O(S T) memory."""
  keys, values = index_stack((keys, values), layer)
  keys, values = (dequantize(x, jnp.float32) for x in (keys, values))
  batch, heads, length, dim = queries.shape
  kv_heads = keys.shape[1]
  grouped = queries.astype(jnp.float32).reshape(
    batch, kv_heads, heads // kv_heads, length, dim
  )
  valid = key_positions >= 0
  # Empty slots may contain NaN, and 0 * NaN is NaN.
  keys = jnp.where(valid[..., None], keys.astype(jnp.float32), 0.0)
  values = jnp.where(valid[..., None], values.astype(jnp.float32), 0.0)
  products = jnp.einsum("bkgsd,bktd->bkgst", grouped, keys)
  logits = options.cap(products * options.scale_of(dim))
  visible = valid[:, :, None] & options.visible(
    query_positions[:, None, :, None], key_positions[:, :, None]
  )
  visible = jnp.broadcast_to(visible[:, :, None], logits.shape)
  weights = jax.nn.softmax(logits, axis=-1, where=visible)
  weights = jnp.where(visible, weights, 0.0)
  output = jnp.einsum("bkgst,bktd->bkgsd", weights, values)
  lse = jax.nn.logsumexp(logits, axis=-1, where=visible)
  return Partial(
    output.reshape(*queries.shape[:-1], values.shape[-1]).astype(queries.dtype),
    lse.reshape(queries.shape[:-1]),
  )
