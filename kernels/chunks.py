"""Slots in chunks."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


def by_chunk(
  x: Shaped[Array, "B K T *D"], chunk: int
) -> Shaped[Array, "B K C W *D"]:
  """Splits slots into chunks; zeros pad the last one."""
  length = x.shape[2]
  size = _size(chunk, length)
  widths = ((0, 0), (0, 0), (0, -length % size)) + ((0, 0),) * (x.ndim - 3)
  return jnp.pad(x, widths).reshape(*x.shape[:2], -1, size, *x.shape[3:])


def from_chunks(
  x: Float[Array, "B K C W"], chunk: int, length: int
) -> Float[Array, "B K T"]:
  """Joins chunks to `length` slots, dropping their padding."""
  x = x[..., : _size(chunk, length)]
  return x.reshape(*x.shape[:2], -1)[..., :length]


def _size(chunk: int, length: int) -> int:
  return min(chunk, length) if chunk else length
