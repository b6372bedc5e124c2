"""Chunked attention against every logit at once, and against jax.nn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.attention import attention, chunked
from kvjax.kernels.attention.online import Online
from kvjax.kernels.attention.options import AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.attention.query_chunks import in_query_chunks
from kvjax.kernels.quantized import Quantized, dequantize, quantize


def block(seed, B, N, K, S, T, D, dtype="float32"):
  """S queries at the end of T slots; some slots empty and full of NaN."""
  rng = np.random.default_rng(seed)
  q = rng.normal(size=(B, N, S, D)).astype(dtype)
  k, v = rng.normal(size=(2, B, K, T, D)).astype(dtype)
  empty = rng.random((B, K, T)) < 0.3
  places = np.where(empty, -1, np.arange(T, dtype=np.int32))
  k[empty] = v[empty] = np.nan
  queries = np.broadcast_to(np.arange(T - S, T, dtype=np.int32), (B, S))
  return tuple(map(jnp.asarray, (q, k, v, queries, places)))


# Compiled: eagerly, JAX would compile a program for each step.
OURS = jax.jit(attention)
REFERENCE = jax.jit(functools.partial(attention, implementation="reference"))


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
  np.testing.assert_allclose(OURS(*args), REFERENCE(*args), rtol=0, atol=2e-6)


@pytest.mark.parametrize("logits", [64, 1000, 2**17])
def test_chunk_size_does_not_matter(monkeypatch, logits):
  args = block(1, 2, 4, 2, 16, 101, 8)
  monkeypatch.setattr(chunked, "LOGITS", logits)
  ours = jax.jit(lambda *args: attention(*args))(*args)
  np.testing.assert_allclose(ours, REFERENCE(*args), rtol=0, atol=2e-6)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("copied", [1, 3000, 9000, 2**19])
@pytest.mark.parametrize(("rows", "length"), [(6, 1), (7, 1), (7, 33)])
def test_rows_of_a_layer_attend_few_at_a_time(
  monkeypatch, rows, length, copied, quantized
):
  """Layers have 1,616 entries a row: one, five or all seven rows are copied."""
  monkeypatch.setattr(chunked, "COPIED", copied)
  layers = [block(seed, rows, 4, 2, length, 101, 8) for seed in range(3)]
  q, k, v, queries, places = layers[1]
  keys, values = (jnp.stack([layer[i] for layer in layers]) for i in (1, 2))
  # Wider than keys.
  v, values = (jnp.concatenate([x, x], axis=-1) for x in (v, values))
  if quantized:
    k, v, keys, values = (quantize(x, "int8") for x in (k, v, keys, values))
  options = chunked.AttentionOptions(window=60)

  def attend(q, keys, values, queries, places, layer):
    return attention(
      q, keys, values, queries, places, options=options, layer=layer
    )

  ours = jax.jit(attend)(q, keys, values, queries, places, jnp.int32(1))
  reference = functools.partial(
    attention, implementation="reference", options=options
  )
  expected = jax.jit(reference)(q, k, v, queries, places)
  np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)


def test_equals_jax_nn_on_a_causal_prompt():
  q, k, v, places, _ = block(2, 2, 4, 2, 90, 90, 16)
  k, v = (jnp.asarray(np.nan_to_num(x)) for x in (k, v))
  valid = np.broadcast_to(np.arange(90, dtype=np.int32), (2, 2, 90))
  ours = OURS(q, k, v, places, jnp.asarray(valid))
  swapped = (np.swapaxes(x, 1, 2) for x in (q, k, v))
  run = functools.partial(jax.nn.dot_product_attention, is_causal=True)
  theirs = jax.jit(run)(*swapped)
  np.testing.assert_allclose(ours, np.swapaxes(theirs, 1, 2), rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 40], ids=["causal", "window"])
@pytest.mark.parametrize("hidden", ["nothing", "a key", "a query"])
def test_chunks_that_are_visible_to_all_need_no_mask(
  monkeypatch, hidden, window
):
  """128 tokens in tiles of 16 x 16: a query's own, and those before it."""
  q, k, v, queries, _ = block(2, 1, 2, 1, 128, 128, 8)
  k, v = jnp.nan_to_num(k, nan=1.0), jnp.nan_to_num(v, nan=1.0)
  places = jnp.arange(128, dtype=jnp.int32)[None, None]
  if hidden == "a key":
    places = places.at[..., 20].set(-1)
    k, v = k.at[:, :, 20].set(jnp.nan), v.at[:, :, 20].set(jnp.nan)
  if hidden == "a query":
    queries = queries.at[:, 90].set(-1)
  args = q, k, v, queries, places
  monkeypatch.setattr(chunked, "CPU_QUERY_CHUNK", 16)
  monkeypatch.setattr(chunked, "CPU_LOGITS", 16 * 16)
  options = AttentionOptions(window=window)

  def run(implementation="chunked"):
    of = functools.partial(attention, implementation=implementation)
    return jax.jit(lambda *args: of(*args, options=options))(*args)

  np.testing.assert_allclose(run(), run("reference"), rtol=0, atol=2e-6)

  after = Online.after

  def marked(self, queries, keys, values, visible, options):
    seen = after(self, queries, keys, values, visible, options)
    if visible is not None:
      return seen
    return seen._replace(weighted=seen.weighted * jnp.nan)

  monkeypatch.setattr(Online, "after", marked)
  unmasked = np.isnan(run()).all(axis=-1).reshape(2, 8, 16)
  # All but the first 16 queries have such a chunk, with a window that of the
  # 16 tokens before them.
  expected = np.arange(8) > 0
  if hidden == "a key" and window:
    expected[2] = False
  if hidden == "a query":
    expected[5] = False
  np.testing.assert_array_equal(
    unmasked, np.broadcast_to(expected[:, None], unmasked.shape)
  )


def test_bfloat16_stays_close_to_float32():
  args = block(3, 1, 4, 2, 40, 200, 32, "bfloat16")
  ours = OURS(*args)
  wide = [jnp.asarray(np.float32(x)) for x in args[:3]]
  reference = REFERENCE(*wide, *args[3:])
  assert ours.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.float32(ours), reference, rtol=2e-2, atol=2e-2)


@functools.partial(jax.jit, static_argnums=2)
def eighths(x, places, dtype):
  """In eight bits, with NaN scales where nothing is held; and made whole."""
  small = quantize(jnp.nan_to_num(x), dtype)
  scale = jnp.where(places[..., None] < 0, jnp.nan, small.scale)
  return Quantized(small.qvalue, scale), dequantize(small, "float32")


@pytest.mark.parametrize(("S", "small"), [(1, "float8_e4m3fn"), (70, "int8")])
def test_eight_bits_are_made_whole_a_chunk_at_a_time(monkeypatch, S, small):
  monkeypatch.setattr(chunked, "DEQUANTIZED", 32)
  q, k, v, queries, places = block(6, 2, 4, 2, S, 101, 8)
  (k, whole_k), (v, whole_v) = (eighths(x, places, small) for x in (k, v))
  ours = jax.jit(lambda *args: attention(*args))(q, k, v, queries, places)
  for keys, values in [(k, v), (whole_k, whole_v)]:
    reference = REFERENCE(q, keys, values, queries, places)
    np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-6)


@pytest.mark.parametrize("run", [OURS, REFERENCE], ids=["ours", "reference"])
def test_a_query_that_sees_nothing_gets_zeros(run):
  q, k, v, queries, places = block(4, 1, 2, 1, 3, 9, 8)
  queries = np.array(queries)
  queries[0, 1] = -1
  output = np.asarray(run(q, k, v, jnp.asarray(queries), places))
  assert not np.any(output[:, :, 1])
  assert np.all(np.isfinite(output))


def test_causality_goes_by_position_not_by_slot():
  q, k, v, queries, places = block(5, 1, 2, 2, 4, 50, 8)
  order = np.random.default_rng(0).permutation(50)
  moved = (jnp.asarray(np.asarray(x)[:, :, order]) for x in (k, v, places))
  keys, values, at = moved
  np.testing.assert_allclose(
    OURS(q, keys, values, queries, at),
    OURS(q, k, v, queries, places),
    rtol=0,
    atol=2e-6,
  )


def memory_of(length, heads):
  """Bytes of attention to a prompt, besides arguments and output."""
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
  # Not `attention` itself, whose program of the same shapes would be reused.
  compiled = jax.jit(lambda *x: attention(*x)).lower(*shapes).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_memory_is_linear_in_the_prompt():
  length, heads = 8192, 4
  temporary = memory_of(length, heads)
  chunk_logits = heads * min(chunked.LOGITS, chunked.CPU_LOGITS) * 4
  inputs = heads * length * 8 * 4
  assert temporary < 3 * chunk_logits + 4 * inputs
  assert temporary < heads * length * length * 4 / 50


def test_a_cpu_attends_in_smaller_tiles(monkeypatch):
  ours = memory_of(2048, 8)
  monkeypatch.setattr(chunked, "CPU_QUERY_CHUNK", chunked.QUERY_CHUNK)
  monkeypatch.setattr(chunked, "CPU_LOGITS", chunked.LOGITS)
  assert ours < 0.6 * memory_of(2048, 8)


@pytest.mark.parametrize(
  ("length", "size"), [(129, 65), (896, 128), (300, 100)]
)
def test_chunks_of_queries_have_equal_lengths(length, size):
  seen = []

  def attend(queries, positions):
    seen.append((queries.shape[3], positions.shape[1]))
    return Partial(queries, jnp.zeros(queries.shape[:-1]))

  queries = jnp.arange(2.0 * 4 * length).reshape(2, 4, length, 1)
  positions = jnp.zeros((2, length), jnp.int32)
  found = in_query_chunks(attend, queries, positions, 2, 128)
  assert {*seen} == {(size, size)}
  np.testing.assert_array_equal(found.output, queries)


def test_a_cache_of_eight_bits_is_never_whole():
  length, heads, dim = 2**16, 2, 64
  shapes = jax.eval_shape(
    lambda: (
      jnp.zeros((1, heads, 1, dim)),
      *(quantize(jnp.zeros((1, heads, length, dim)), "int8") for _ in "kv"),
      jnp.zeros((1, 1), jnp.int32),
      jnp.zeros((1, heads, length), jnp.int32),
    )
  )
  compiled = jax.jit(attention).lower(*shapes).compile()
  temporary = compiled.memory_analysis().temp_size_in_bytes
  assert temporary < heads * length * dim  # a quarter of the keys, whole
