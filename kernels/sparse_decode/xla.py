"""Attention to listed slots in XLA, over a gathered copy of them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.quantized import Quantized, dequantize
from kvjax.kernels.stacks import gather_slots


def sparse_decode_xla(
  queries: Float[Array, "B N D"],
  keys: Float[Array, "L B K T D"] | Quantized,
  values: Float[Array, "L B K T Dv"] | Quantized,
  slots: Int[Array, "B H M"],
  bias: Float[Array, "B N M"] | None,
  layer: Int[Array, ""],
  options: AttentionOptions = PLAIN,
) -> Partial:
  """XLA version of `kvjax.kernels.sparse_decode.sparse_decode`."""
  batch, heads, dim = queries.shape
  lists, num_slots = slots.shape[1:]
  valid = slots >= 0

  def take(x: Shaped[Array, "L B K T D"]) -> Shaped[Array, "B H M D"]:
    index = jnp.maximum(slots, 0).reshape(batch, x.shape[2], -1)
    rows = gather_slots(x, layer, index)
    return rows.reshape(batch, lists, num_slots, -1)

  def gather(
    x: Float[Array, "L B K T D"] | Quantized,
  ) -> Float[Array, "B H M D"]:
    rows = dequantize(jax.tree.map(take, x), queries.dtype)
    # Slot 0 replaces -1, and may contain NaN.
    return jnp.where(valid[..., None], rows, jnp.zeros((), rows.dtype))

  grouped = queries.reshape(batch, lists, heads // lists, dim)
  logits = jnp.einsum(
    "bhgd,bhmd->bhgm",
    grouped,
    gather(keys),
    preferred_element_type=jnp.float32,
  )
  logits = options.cap(logits * options.scale_of(dim))
  if bias is not None:
    logits = logits + bias.reshape(logits.shape)
  logits = jnp.where(valid[:, :, None], logits, -jnp.inf)
  largest = jnp.max(logits, axis=-1, initial=-jnp.inf)
  finite = jnp.where(jnp.isfinite(largest), largest, 0.0)
  weights = jnp.exp(logits - finite[..., None])
  listed = gather(values)
  weighted = jnp.einsum(
    "bhgm,bhmd->bhgd",
    weights.astype(listed.dtype),
    listed,
    preferred_element_type=jnp.float32,
  )
  partial = Partial.of(
    largest, jnp.sum(weights, axis=-1), weighted, queries.dtype
  )
  return Partial(
    partial.output.reshape(batch, heads, values.shape[-1]),
    partial.lse.reshape(batch, heads),
  )
