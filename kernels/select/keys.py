"""Scores as integers of the same order."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# What -inf and NaN become, below all other scores.
NEVER = -(2**31) + 2**23 - 1
# Above inf.
BEYOND = 0x7F800001


def ordered(scores: Float[Array, "*B T"]) -> Int[Array, "*B T"]:
  """Integers that compare as the scores do.

  Only integers are compared here, so that scores too small to be normal, which
  some devices take for zero, keep their order.
  """
  bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
  bits = jnp.where(bits == -(2**31), 0, bits)  # -0.0 is 0.0
  keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
  nan = (bits & 0x7FFFFFFF) >= BEYOND
  return jnp.where(nan, NEVER, keys)
