"""Keys and values in eight bits, with one scale per token and head."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped


class Quantized(NamedTuple):
  """Quantized vectors with one scale each, x ~ qvalue * scale.

  The names and the symmetric scaling by the largest magnitude follow `QArray`
  of qwix (github.com/google/qwix), with all axes but the last channelwise. The
  two arrays have the same leading axes, so the same slices, gathers and
  shardings apply to both.

  Attributes:
    qvalue: int8 or float8_e4m3fn entries.
    scale: the scale of each vector.
  """

  qvalue: Shaped[Array, "*B T D"]
  scale: Float[Array, "*B T 1"]

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the vectors."""
    return self.qvalue.shape


def stored(x: Shaped[Array, "*B T D"] | Quantized) -> Shaped[Array, "*B T D"]:
  """Returns the entries as they lie in memory, without their scales."""
  return x.qvalue if isinstance(x, Quantized) else x


def quantize(x: Float[Array, "*B T D"], dtype: DTypeLike) -> Quantized:
  """Rounds vectors to eight bits.

  The scale is the largest magnitude divided by the dtype's largest number, 127
  or 448. A vector of zeros gets scale 1. (For int8, qwix divides by 127.5 and
  clips the largest entry. Dividing by 127 bounds every error by half a scale.)

  Args:
    x: finite vectors.
    dtype: int8 or float8_e4m3fn.

  Returns:
    Entries of the dtype and float32 scales. The error of an entry is at most
    scale / 2 in int8, and in float8_e4m3fn at most 1/16 of the entry or
    scale / 1024.

  Raises:
    ValueError: the dtype is neither of these.
  """
  is_int8 = jnp.dtype(dtype) == jnp.int8
  if not is_int8 and jnp.dtype(dtype) != jnp.float8_e4m3fn:
    raise ValueError(f"int8 or float8_e4m3fn, not {jnp.dtype(dtype)}.")
  bound = 127.0 if is_int8 else 448.0
  x = x.astype(jnp.float32)
  largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0.0)
  # Vectors with a subnormal scale become zeros: devices may flush it to zero.
  scale = largest / bound
  scale = jnp.where(scale >= jnp.finfo(jnp.float32).tiny, scale, 1.0)
  scaled = jnp.clip(x / scale, -bound, bound)
  return Quantized(
    (jnp.round(scaled) if is_int8 else scaled).astype(dtype), scale
  )


def dequantize(
  x: Shaped[Array, "*B T D"] | Quantized, dtype: DTypeLike
) -> Float[Array, "*B T D"]:
  """Restores quantized vectors; returns an array unchanged.

  Args:
    x: vectors, quantized or not.
    dtype: of the result, which is rounded from float32.
  """
  if not isinstance(x, Quantized):
    return x
  product = x.qvalue.astype(jnp.float32) * x.scale.astype(jnp.float32)
  return product.astype(dtype)
