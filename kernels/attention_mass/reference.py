"""Reference attention mass from all weights, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions


def causal_mass_reference(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"],
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  sinks: Float[Array, " N"] | None = None,
  options: AttentionOptions = PLAIN,
) -> Float[Array, "B N T"]:
  """Computes `attention_mass.api.causal_mass` in O(S T) memory."""
  row_positions = query_positions[:, None, :, None]
  column_positions = key_positions[:, :, None]
  visible = (
    (row_positions >= 0)
    & (column_positions >= 0)
    & options.visible(row_positions, column_positions)
  )
  scale = options.scale_of(queries.shape[-1])
  return _mass(queries, keys, visible, scale, options, sinks)


def chunk_mass_reference(
  queries: Float[Array, "B N T D"],
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  chunk: int,
  scale: float,
) -> Float[Array, "B N T"]:
  """Computes `attention_mass.api.chunk_mass` in O(T T) memory."""
  number = jnp.arange(valid.shape[-1], dtype=jnp.int32) // chunk
  together = number[:, None] == number[None]
  visible = together[None, None] & valid[..., None] & valid[:, :, None]
  return _mass(queries, keys, visible, scale)


def _mass(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"],
  visible: Bool[Array, "B K S T"],
  scale: float,
  options: AttentionOptions = PLAIN,
  sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B N T"]:
  """Sums the weights of visible keys; masked NaN has no effect."""
  group = queries.shape[1] // keys.shape[1]
  keys = jnp.repeat(keys.astype(jnp.float32), group, axis=1)
  visible = jnp.repeat(visible, group, axis=1)
  logits = scale * jnp.einsum(
    "bnsd,bntd->bnst",
    queries.astype(jnp.float32),
    keys,
    precision=jax.lax.Precision.HIGHEST,
  )
  logits = jnp.where(visible, options.cap(logits), -jnp.inf)
  if sinks is not None:
    sink = sinks.astype(jnp.float32)[None, :, None, None]
    sink = jnp.broadcast_to(sink, (*logits.shape[:-1], 1))
    logits = jnp.concatenate([logits, sink], axis=-1)
  # A query that sees nothing gets NaN, which the last `where` removes.
  weights = jax.nn.softmax(logits, axis=-1)
  if sinks is not None:
    weights = weights[..., :-1]
  return jnp.sum(jnp.where(visible, weights, 0.0), axis=2)
