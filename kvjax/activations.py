"""What an attention layer saw of a block of tokens."""

from jaxtyping import Array, Float, Int

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
