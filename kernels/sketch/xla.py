"""Sketches and leverage rows in XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.kernels.chunks import by_chunk
from kvjax.kernels.sketch.sketched import Sketch, near_mean


def sketch(
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  factor: Float[Array, "K D k"] | None,
  *,
  chunk: int,
  center: bool,
) -> Sketch:
  """Computes `kvjax.kernels.sketch.api.sketch`."""
  parts, chunk_valid = (
    by_chunk(keys, chunk),
    by_chunk(valid, chunk)[..., None, :],
  )
  x = parts.astype(jnp.float32)
  if center:
    # A large common offset would dominate the rounding errors of the product.
    x = x - near_mean(parts, chunk_valid[..., 0, :])[..., None, :]
  if factor is None:
    x = jnp.swapaxes(x, -1, -2)
  else:
    # One factor per row, so that einsum does not transpose the keys.
    factor = jnp.broadcast_to(factor, (x.shape[0], *factor.shape))
    x = jnp.einsum("bkde,bkcwd->bkcew", factor, x, precision="highest")
  # Until here, NaN in an empty slot affects only its own column.
  x = jnp.where(chunk_valid, x, 0.0)
  if center:
    count = jnp.sum(chunk_valid.astype(jnp.float32), axis=-1, keepdims=True)
    # The product is linear, so the rest of the mean is subtracted after it.
    mean = jnp.sum(x, axis=-1, keepdims=True) / jnp.maximum(count, 1.0)
    x = jnp.where(chunk_valid, x - mean, 0.0)
  gram = jnp.einsum("bkcew,bkcfw->bkcef", x, x, precision="highest")
  return Sketch(x, jnp.zeros(x.shape[:-1], jnp.float32), gram)


def leverage_rows(
  projected: Float[Array, "B K C k W"],
  mean: Float[Array, "B K C k"],
  whitener: Float[Array, "B K C k k"],
) -> Float[Array, "B K C W"]:
  """Computes `kernels.sketch.api.leverage_rows`, without its mask."""
  columns = projected - mean[..., None]
  whitened = jnp.einsum(
    "bkcfe,bkcew->bkcfw", whitener, columns, precision="highest"
  )
  return jnp.sum(whitened * whitened, axis=-2)
