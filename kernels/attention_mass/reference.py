"""Attention mass from the whole matrix of weights, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def causal_mass_reference(
  queries: Float[Array, "G S D"],
  keys: Float[Array, "T D"],
  query_positions: Int[Array, " S"],
  key_positions: Int[Array, " T"],
) -> Float[Array, "G T"]:
  """See `kernels.attention_mass.api.causal_mass`; O(S T) memory."""
  seen = (query_positions[:, None] >= 0) & (key_positions[None] >= 0)
  seen &= key_positions[None] <= query_positions[:, None]
  return _mass(queries, keys, seen, queries.shape[-1] ** -0.5)


def chunk_mass_reference(
  queries: Float[Array, "G T D"],
  keys: Float[Array, "T D"],
  held: Bool[Array, " T"],
  chunk: int,
  scale: float,
) -> Float[Array, "G T"]:
  """See `kernels.attention_mass.api.chunk_mass`; O(T T) memory."""
  number = jnp.arange(keys.shape[0]) // chunk
  seen = (number[:, None] == number[None]) & held[:, None] & held[None]
  return _mass(queries, keys, seen, scale)


def _mass(
  queries: Float[Array, "G S D"],
  keys: Float[Array, "T D"],
  seen: Bool[Array, "S T"],
  scale: float,
) -> Float[Array, "G T"]:
  """Sums of the weights of those that each query sees; NaN has no effect."""
  queries = jnp.where(
    jnp.any(seen, axis=1)[None, :, None], queries.astype(jnp.float32), 0.0
  )
  keys = jnp.where(
    jnp.any(seen, axis=0)[:, None], keys.astype(jnp.float32), 0.0
  )
  logits = jnp.einsum("gsd,td->gst", queries, keys) * scale
  weights = jax.nn.softmax(logits, axis=-1, where=seen[None])
  return jnp.sum(weights, axis=1, where=seen[None])
