"""Attention of prompts to themselves by cuDNN."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.prompt_attention.padding import cleared


def prompt_attention_gpu(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K S D"],
  values: Float[Array, "B K S D"],
  positions: Int[Array, "B S"],
) -> Float[Array, "B N S D"]:
  """See `kvjax.kernels.prompt_attention.api.prompt_attention`.

  Raises:
    NotImplementedError: cuDNN is not there, or does not serve: numbers have 32
      bits, or the head dim is above 256 or no multiple of 8.
  """
  keys, values = (cleared(x, positions) for x in (keys, values))
  operands = (jnp.swapaxes(x, 1, 2) for x in (queries, keys, values))
  try:
    # Padding follows all tokens, so that these do not see it.
    output = jax.nn.dot_product_attention(
      *operands, is_causal=True, implementation="cudnn"
    )
  except RuntimeError as error:  # a NotImplementedError is one too
    raise NotImplementedError(str(error)) from error
  return jnp.swapaxes(output, 1, 2)
