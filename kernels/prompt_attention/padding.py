"""Clears padding that library kernels read."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def clear_padding(
  x: Float[Array, "B K S D"], positions: Int[Array, "B S"]
) -> Float[Array, "B K S D"]:
  """Sets padding to zero, since a weight of 0 times NaN would be NaN."""
  real = (positions >= 0)[:, None, :, None]
  return jnp.where(real, x, jnp.zeros((), x.dtype))
