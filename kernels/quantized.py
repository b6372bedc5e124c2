"""Keys and values in eight bits, with a scale for each token of a head."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped


class Quantized(NamedTuple):
  """Vectors as small numbers times a scale each, x ~ qvalue * scale.

  The names and the symmetric scaling by the largest magnitude are those of
  `QArray` of qwix (github.com/google/qwix), with all axes but the last
  channelwise. The two arrays have the same leading axes: what slices, gathers
  or spreads the one over devices does it to the other.

  Attributes:
    qvalue: int8 or float8_e4m3fn.
    scale: of each vector.
  """

  qvalue: Shaped[Array, "*B T D"]
  scale: Float[Array, "*B T 1"]

  @property
  def shape(self) -> tuple[int, ...]:
    """Of what it stands for."""
    return self.qvalue.shape


def stored(
  x: Shaped[Array, "*B T D"] | Quantized,
) -> Shaped[Array, "*B T D"]:
  """The numbers in memory, without their scales."""
  return x.qvalue if isinstance(x, Quantized) else x


def quantize(x: Float[Array, "*B T D"], dtype: DTypeLike) -> Quantized:
  """Rounds vectors to eight bits.

  The scale is the largest magnitude over the largest number of the dtype, 127
  or 448; a vector of zeros gets 1. (qwix divides by 127.5 for int8 and clips
  the largest; with 127 no entry is further off than half a scale.)

  Args:
    x: vectors, finite.
    dtype: int8 or float8_e4m3fn.

  Returns:
    Numbers of the dtype and float32 scales. In int8 an entry is off by at most
    scale / 2, in float8_e4m3fn by at most 1/16 of it or scale / 1024.

  Raises:
    ValueError: another dtype.
  """
  whole = jnp.dtype(dtype) == jnp.int8
  if not whole and jnp.dtype(dtype) != jnp.float8_e4m3fn:
    raise ValueError(f"int8 or float8_e4m3fn, not {jnp.dtype(dtype)}.")
  bound = 127.0 if whole else 448.0
  x = x.astype(jnp.float32)
  largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0.0)
  # Too small to be divided is zero.
  scale = largest / bound
  scale = jnp.where(scale >= jnp.finfo(jnp.float32).tiny, scale, 1.0)
  scaled = jnp.clip(x / scale, -bound, bound)
  return Quantized(
    (jnp.round(scaled) if whole else scaled).astype(dtype), scale
  )


def dequantize(
  x: Shaped[Array, "*B T D"] | Quantized, dtype: DTypeLike
) -> Float[Array, "*B T D"]:
  """What quantized vectors stand for; an array stays as it is.

  Args:
    x: vectors, whole or in eight bits.
    dtype: in which the product is returned, rounded from float32.
  """
  if not isinstance(x, Quantized):
    return x
  product = x.qvalue.astype(jnp.float32) * x.scale.astype(jnp.float32)
  return product.astype(dtype)
