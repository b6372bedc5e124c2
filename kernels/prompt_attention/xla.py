"""Prompt attention over chunks of slots, in XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention import attention
from kvjax.kernels.attention.options import PLAIN, AttentionOptions


def prompt_attention_xla(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K S D"],
  values: Float[Array, "B K S Dv"],
  positions: Int[Array, "B S"],
  sinks: Float[Array, " N"] | None = None,
  options: AttentionOptions = PLAIN,
) -> Float[Array, "B N S Dv"]:
  """Computes `kvjax.kernels.prompt_attention.api.prompt_attention`."""
  key_positions = jnp.broadcast_to(positions[:, None], keys.shape[:3])
  return attention(
    queries,
    keys,
    values,
    positions,
    key_positions,
    options=options,
    sinks=sinks,
  )
