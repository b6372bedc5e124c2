"""What rounding to eight bits costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.quantized import dequantize, quantize


def vectors():
  """Of many magnitudes, one of zeros, one hardly more."""
  x = jax.random.normal(jax.random.key(0), (3, 50, 16))
  x = x * 10.0 ** jnp.linspace(-6, 6, 50)[None, :, None]
  return x.at[0, 0].set(0.0).at[0, 1].set(1e-38)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("small", ["int8", "float8_e4m3fn"])
def test_no_entry_is_further_off_than_half_a_step(dtype, small):
  x = vectors().astype(dtype)
  actual = quantize(x, small)
  assert actual.qvalue.dtype == jnp.dtype(small)
  assert actual.scale.shape == (3, 50, 1)
  exact = np.asarray(x, np.float64)
  scale = np.asarray(actual.scale, np.float64)
  off = np.abs(np.asarray(dequantize(actual, "float32"), np.float64) - exact)
  floats = np.maximum(np.abs(exact) / 8, scale / 512)
  step = scale if small == "int8" else floats
  assert np.all(off <= step / 2 * (1 + 1e-5))
  # The largest of a vector is met, and signs are kept.
  largest = np.max(np.abs(exact), axis=-1)[:, 2:]
  met = np.max(np.abs(np.asarray(dequantize(actual, "float32"))), axis=-1)[
    :, 2:
  ]
  np.testing.assert_allclose(met, largest, rtol=1e-6)
  assert np.all(np.asarray(actual.qvalue, np.float32) * exact >= 0)


@pytest.mark.parametrize("small", ["int8", "float8_e4m3fn"])
def test_zeros_stay_zeros(small):
  actual = quantize(jnp.zeros((2, 3, 4)), small)
  assert np.all(np.asarray(actual.scale) == 1.0)
  assert not np.any(dequantize(actual, "bfloat16"))


def test_arrays_stay_as_they_are():
  x = vectors()
  assert dequantize(x, "bfloat16") is x


def test_only_eight_bits():
  with pytest.raises(ValueError, match="not int4"):
    quantize(vectors(), "int4")
