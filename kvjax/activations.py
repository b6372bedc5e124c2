"""What an attention layer saw of a block of tokens."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.prompt_attention import prompt_attention
from kvjax.struct import struct


@struct
class Activations:
  """Projections of a block of S tokens in one layer, as attention uses them.

  Attributes:
    queries: rotated queries; query head j reads KV head j // G.
    keys: rotated keys, as the cache stores them.
    values: values.
    keys_unrotated: keys before RoPE, after the model's own key norm if any.
    positions: each token's place in its own row; -1 marks padding.
  """

  queries: Float[Array, "B N S D"]
  keys: Float[Array, "B K S D"]
  values: Float[Array, "B K S D"]
  keys_unrotated: Float[Array, "B K S D"]
  positions: Int[Array, "B S"]

  def attend_to_themselves(self) -> Float[Array, "B N S D"]:
    """Attention of rows that begin with the block, padded on the right."""
    return prompt_attention(
      self.queries, self.keys, self.values, self.positions
    )

  def with_kv_heads(self, count: int) -> "Activations":
    """Keys and values repeated for `count` heads, each for fewer queries."""
    times = count // self.keys.shape[1]
    if times == 1:
      return self
    return dataclasses.replace(
      self,
      keys=jnp.repeat(self.keys, times, axis=1),
      values=jnp.repeat(self.values, times, axis=1),
      keys_unrotated=jnp.repeat(self.keys_unrotated, times, axis=1),
    )
