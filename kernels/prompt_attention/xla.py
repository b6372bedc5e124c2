"""Attention of prompts to themselves by chunks of slots, in XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention import attention


def prompt_attention_xla(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K S D"],
  values: Float[Array, "B K S D"],
  positions: Int[Array, "B S"],
) -> Float[Array, "B N S D"]:
  """See `kvjax.kernels.prompt_attention.api.prompt_attention`."""
  places = jnp.broadcast_to(positions[:, None], keys.shape[:3])
  return attention(queries, keys, values, positions, places)
