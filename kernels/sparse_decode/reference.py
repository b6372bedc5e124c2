"""Reference in float32: attention head by head over all slots."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.quantized import Quantized, dequantize


def sparse_decode_reference(
  queries: Float[Array, "B N D"],
  keys: Float[Array, "B K T D"] | Quantized,
  values: Float[Array, "B K T Dv"] | Quantized,
  slots: Int[Array, "B H M"],
  bias: Float[Array, "B N M"] | None = None,
  options: AttentionOptions = PLAIN,
) -> Partial:
  """Reference of `kvjax.kernels.sparse_decode.sparse_decode`."""
  keys, values = (dequantize(x, jnp.float32) for x in (keys, values))
  _, heads, dim = queries.shape
  kv_heads, capacity = keys.shape[1:3]
  lists = slots.shape[1]

  def one_head(row: Array, head: Array) -> tuple[Array, Array]:
    kv_head = head // (heads // kv_heads)
    listed = slots[row, head // (heads // lists)]
    extra = jnp.zeros(listed.shape) if bias is None else bias[row, head]
    logits = jnp.full(capacity + 1, -jnp.inf)
    # One more place takes what is written for -1; then it is cut off.
    place = jnp.where(listed >= 0, listed, capacity)
    query = queries[row, head].astype(jnp.float32)
    products = keys[row, kv_head].astype(jnp.float32) @ query
    all_logits = options.cap(products * options.scale_of(dim))
    listed_logits = jnp.append(all_logits, 0.0)[place] + extra
    logits = logits.at[place].set(listed_logits)[:capacity]
    named = jnp.isfinite(logits)
    lse = jax.nn.logsumexp(logits)
    weights = jnp.where(named, jnp.exp(logits - lse), 0.0)
    clean = jnp.where(named[:, None], values[row, kv_head], 0)
    return weights @ clean.astype(jnp.float32), lse

  over_heads = jax.vmap(one_head, in_axes=(None, 0))
  over_rows = jax.vmap(over_heads, in_axes=(0, None))
  output, lse = over_rows(
    jnp.arange(queries.shape[0], dtype=jnp.int32),
    jnp.arange(heads, dtype=jnp.int32),
  )
  return Partial(output.astype(queries.dtype), lse)
