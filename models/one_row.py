"""Products of a single row and a matrix."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvjax.kernels.dispatch import target_platform

_Product = Callable[[Float[Array, "*B I"]], Float[Array, "*B O"]]


class Projection(nnx.Linear):
  """A linear layer."""

  def __call__(
    self, inputs: Float[Array, "*B I"], out_sharding: Any = None
  ) -> Float[Array, "*B O"]:
    """Multiplies the last axis by the matrix."""
    product = functools.partial(super().__call__, out_sharding=out_sharding)
    return multiplied(product, inputs)


def multiplied(
  product: _Product, rows: Float[Array, "*B I"]
) -> Float[Array, "*B O"]:
  """Computes a product with a matrix, on GPUs of two rows at least.

  XLA has other programs for one row there, which copy the matrix: elementwise
  products that are summed, or a conversion to float32.
  """
  if rows.size != rows.shape[-1] or target_platform() != "gpu":
    return product(rows)
  two = jnp.pad(rows.reshape(1, -1), ((0, 1), (0, 0)))
  return product(two)[:1].reshape(*rows.shape[:-1], -1)
