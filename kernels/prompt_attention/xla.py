"""Prompt attention over chunks of slots, in XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention import attention
from kvjax.kernels.attention.options import PLAIN, AttentionOptions


def prompt_attention_xla(
  queries: Float[Array, "B N Q D"],
  keys: Float[Array, "B K S D"],
  values: Float[Array, "B K S Dv"],
  positions: Int[Array, "B S"],
  sinks: Float[Array, " N"] | None = None,
  start: Int[Array, ""] | None = None,
  options: AttentionOptions = PLAIN,
) -> Float[Array, "B N Q Dv"]:
  """Computes `kvjax.kernels.prompt_attention.api.prompt_attention`.

  Args:
    queries: queries of all tokens, or of consecutive ones.
    keys: keys of all tokens.
    values: values of all tokens.
    positions: positions of all tokens.
    sinks: logits of attention sinks.
    start: the first token with a query; None if all have one.
    options: window, scale and softcap.
  """
  key_positions = jnp.broadcast_to(positions[:, None], keys.shape[:3])
  if start is not None:
    size = queries.shape[2]
    positions = jax.lax.dynamic_slice_in_dim(positions, start, size, 1)
  return attention(
    queries,
    keys,
    values,
    positions,
    key_positions,
    options=options,
    sinks=sinks,
  )
