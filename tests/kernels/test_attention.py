"""Chunked attention against every logit at once, and against jax.nn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import attention, chunked
from kernels.quantised import Quantised, dequantise, quantise


def block(seed, B, N, K, S, T, D, dtype="float32"):
  """S queries at the end of T slots; some slots empty and full of NaN."""
  keys = jax.random.split(jax.random.key(seed), 4)
  q = jax.random.normal(keys[0], (B, N, S, D)).astype(dtype)
  k = jax.random.normal(keys[1], (B, K, T, D)).astype(dtype)
  v = jax.random.normal(keys[2], (B, K, T, D)).astype(dtype)
  empty = jax.random.bernoulli(keys[3], 0.3, (B, K, T))
  places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, K, T))
  places = jnp.where(empty, -1, places)
  nan = jnp.asarray(jnp.nan, dtype)
  k, v = (jnp.where(empty[..., None], nan, x) for x in (k, v))
  queries = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32) + T - S, (B, S))
  return q, k, v, queries, places


SHAPES = [
  # B N K S T D
  (1, 1, 1, 1, 1, 8),
  (2, 4, 2, 1, 77, 64),
  (1, 8, 1, 33, 130, 16),
  (1, 2, 2, 300, 300, 8),
  (2, 6, 3, 257, 513, 8),
  (1, 2, 1, 512, 1100, 16),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape):
  args = block(0, *shape)
  ours = jax.jit(attention)(*args)
  reference = attention(*args, "reference")
  np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-6)


@pytest.mark.parametrize("logits", [64, 1000, 2**17])
def test_chunk_size_does_not_matter(monkeypatch, logits):
  args = block(1, 2, 4, 2, 16, 101, 8)
  reference = attention(*args, "reference")
  monkeypatch.setattr(chunked, "LOGITS", logits)
  np.testing.assert_allclose(attention(*args), reference, rtol=0, atol=2e-6)


def test_equals_jax_nn_on_a_causal_prompt():
  q, k, v, _, _ = block(2, 2, 4, 2, 90, 90, 16)
  k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)
  places = jnp.broadcast_to(jnp.arange(90, dtype=jnp.int32), (2, 90))
  ours = attention(
    q, k, v, places, jnp.broadcast_to(places[:, None], (2, 2, 90))
  )
  swapped = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
  theirs = jax.nn.dot_product_attention(*swapped, is_causal=True)
  np.testing.assert_allclose(
    ours, jnp.swapaxes(theirs, 1, 2), rtol=0, atol=2e-6
  )


def test_bfloat16_stays_close_to_float32():
  args = block(3, 1, 4, 2, 40, 200, 32, "bfloat16")
  ours = attention(*args)
  wide = [x.astype("float32") for x in args[:3]]
  reference = attention(*wide, *args[3:], "reference")
  assert ours.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    ours.astype("float32"), reference, rtol=2e-2, atol=2e-2
  )


@pytest.mark.parametrize("small", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("S", [1, 70])
def test_eight_bits_are_made_whole_a_chunk_at_a_time(monkeypatch, S, small):
  monkeypatch.setattr(chunked, "WHOLE", 32)
  q, k, v, queries, places = block(6, 2, 4, 2, S, 101, 8)
  k, v = (quantise(jnp.nan_to_num(x), small) for x in (k, v))
  whole = [dequantise(x, "float32") for x in (k, v)]
  k, v = (
    Quantised(x.qvalue, jnp.where(places[..., None] < 0, jnp.nan, x.scale))
    for x in (k, v)
  )
  ours = jax.jit(attention)(q, k, v, queries, places)
  for keys, values in [(k, v), whole]:
    reference = attention(q, keys, values, queries, places, "reference")
    np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_a_query_that_sees_nothing_gets_zeros(implementation):
  q, k, v, queries, places = block(4, 1, 2, 1, 3, 9, 8)
  queries = queries.at[0, 1].set(-1)
  output = attention(q, k, v, queries, places, implementation)
  assert not np.any(output[:, :, 1])
  assert np.all(np.isfinite(output))


def test_causality_goes_by_position_not_by_slot():
  q, k, v, queries, places = block(5, 1, 2, 2, 4, 50, 8)
  order = np.random.default_rng(0).permutation(50)
  shuffled = attention(
    q, k[:, :, order], v[:, :, order], queries, places[:, :, order]
  )
  np.testing.assert_allclose(
    shuffled, attention(q, k, v, queries, places), rtol=0, atol=2e-6
  )


def test_memory_is_linear_in_the_prompt():
  length, heads = 8192, 4
  shapes = [
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in [
      ((1, heads, length, 8), "float32"),
      ((1, heads, length, 8), "float32"),
      ((1, heads, length, 8), "float32"),
      ((1, length), "int32"),
      ((1, heads, length), "int32"),
    ]
  ]
  compiled = jax.jit(attention).lower(*shapes).compile()
  temporary = compiled.memory_analysis().temp_size_in_bytes
  chunk_logits = heads * chunked.LOGITS * 4
  inputs = heads * length * 8 * 4
  assert temporary < 3 * chunk_logits + 4 * inputs
  assert temporary < heads * length * length * 4 / 50


def test_a_cache_of_eight_bits_is_never_whole():
  length, heads, dim = 2**16, 2, 64
  shapes = jax.eval_shape(
    lambda: (
      jnp.zeros((1, heads, 1, dim)),
      *(quantise(jnp.zeros((1, heads, length, dim)), "int8") for _ in "kv"),
      jnp.zeros((1, 1), jnp.int32),
      jnp.zeros((1, heads, length), jnp.int32),
    )
  )
  compiled = jax.jit(attention).lower(*shapes).compile()
  temporary = compiled.memory_analysis().temp_size_in_bytes
  assert temporary < heads * length * dim  # a quarter of the keys, whole
