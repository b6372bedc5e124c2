"""Prompt attention by cuDNN."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.options import (
  PLAIN,
  AttentionOptions,
  decline_unless_plain,
)
from kvjax.kernels.prompt_attention.padding import clear_padding


def prompt_attention_gpu(
  queries: Float[Array, "B N Q D"],
  keys: Float[Array, "B K S D"],
  values: Float[Array, "B K S Dv"],
  positions: Int[Array, "B S"],
  sinks: Float[Array, " N"] | None = None,
  start: Int[Array, ""] | None = None,
  options: AttentionOptions = PLAIN,
) -> Float[Array, "B N Q Dv"]:
  """Computes `kvjax.kernels.prompt_attention.api.prompt_attention`.

  Raises:
    NotImplementedError: cuDNN is missing or does not support the inputs:
      32-bit numbers, a head dim above 256 (before Hopper 128) or no multiple of
      8, capped logits, sinks, values that are not as wide as keys, or queries
      of some of the tokens.
  """
  if start is not None:
    raise NotImplementedError("cuDNN's causal mask starts at the first token.")
  window, scale = options.window, options.scale
  rest = dataclasses.replace(options, window=None, scale=None)
  decline_unless_plain(rest, keys.shape[-1], values.shape[-1], sinks)
  # JAX's window counts the tokens before a query, ours counts the query too.
  local = None if window is None else (window - 1, 0)
  keys, values = (clear_padding(x, positions) for x in (keys, values))
  # `dot_product_attention` expects [B, S, N, D].
  operands = (jnp.swapaxes(x, 1, 2) for x in (queries, keys, values))
  try:
    # Padding follows all tokens, so the causal mask hides it.
    output = jax.nn.dot_product_attention(
      *operands,
      scale=scale,
      is_causal=True,
      local_window_size=local,
      implementation="cudnn",
    )
  except RuntimeError as error:  # a NotImplementedError is one too
    raise NotImplementedError(str(error)) from error
  return jnp.swapaxes(output, 1, 2)
