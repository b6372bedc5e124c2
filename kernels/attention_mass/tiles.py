"""What the programs that work by tiles share."""

import jax.numpy as jnp
from jaxtyping import Array

# Stands for a logit that is not seen; less than any other.
UNSEEN = -0.7 * float(jnp.finfo(jnp.float32).max)
# The position of a slot that is empty: no query reaches it.
NEVER = int(jnp.iinfo(jnp.int32).max)


def filled(x: Array, axis: int, size: int, value: int) -> Array:
  """The array with an axis filled up to a multiple of a size."""
  wide = [(0, 0)] * x.ndim
  wide[axis] = (0, -x.shape[axis] % size)
  return jnp.pad(x, wide, constant_values=value)
