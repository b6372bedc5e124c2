"""Splits float32 numbers into sums of bfloat16 numbers."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# The pairs of three pieces on either side whose products are not below float32
# precision.
# Piece i is about 2**(-8 i) of a number; float32 has 24 bits.
PAIRS = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))


def pieces(x: Float[Array, "*A"], count: int = 3) -> Iterator[Array]:
  """Yields bfloat16 pieces, each the rounded remainder of the previous ones.

  Three pieces add up to any float32 number exactly.
  """
  for _ in range(count):
    near = nearest(x)
    yield near.astype(jnp.bfloat16)
    x = x - near


def nearest(x: Float[Array, "*A"]) -> Float[Array, "*A"]:
  """Rounds float32 numbers to the nearest bfloat16 numbers, kept in float32.

  It works on bits, since compilers may remove a pair of conversions.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  # Ties round away from zero; the next piece makes up for it.
  return jax.lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)
