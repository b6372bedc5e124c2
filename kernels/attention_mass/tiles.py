"""Constants and padding shared by the tiled programs."""

import jax.numpy as jnp
from jaxtyping import Array

# A masked logit: less than any real one, yet finite, so that differences are.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
# The position of an empty slot, beyond that of any query.
NEVER = int(jnp.iinfo(jnp.int32).max)


def pad_to_multiple(x: Array, axis: int, size: int, value: int) -> Array:
  """Pads an axis to a multiple of `size`."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, -x.shape[axis] % size)
  return jnp.pad(x, widths, constant_values=value)
