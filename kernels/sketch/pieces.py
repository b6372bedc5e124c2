"""Float32 numbers as sums of bfloat16 numbers."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Of three pieces on either side, the pairs whose product float32 does not
# round away.
PAIRS = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))


def pieces(x: Float[Array, "*A"], count: int = 3) -> Iterator[Array]:
  """Yields bfloat16 pieces, each of what those before have left of `x`.

  Three of them add up to every float32 number.
  """
  for _ in range(count):
    near = nearest(x)
    yield near.astype(jnp.bfloat16)
    x = x - near


def nearest(x: Float[Array, "*A"]) -> Float[Array, "*A"]:
  """The bfloat16 number next to each float32 one, in float32.

  By bits: compilers may take two conversions in a row for none.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jax.lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)
