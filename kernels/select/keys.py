"""Order-preserving integer keys of float scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# The key of -inf and NaN, below all other scores.
NEVER = -(2**31) + 2**23 - 1
# A key above that of inf.
# Bits from here on, without the sign, are NaN.
BEYOND = 0x7F800001


def ordered(scores: Float[Array, "*B T"]) -> Int[Array, "*B T"]:
  """Maps scores to integers of the same order.

  Integer comparisons keep the order of subnormal scores, which some devices
  flush to zero.
  """
  bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
  bits = jnp.where(bits == -(2**31), 0, bits)  # -0.0 is 0.0
  # The bits of negative numbers grow with the magnitude: reverse their order.
  keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
  nan = (bits & 0x7FFFFFFF) >= BEYOND
  return jnp.where(nan, NEVER, keys)
