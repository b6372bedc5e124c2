"""Attention mass, by every program, against the whole matrix and loops."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType

from kvjax import kernels
from kvjax.kernels.attention_mass import (
  causal_mass,
  chunk_mass,
  tpu_chunks,
  xla,
)
from kvjax.kernels.attention_mass.reference import (
  causal_mass_reference,
  chunk_mass_reference,
)
from kvjax.kernels.attention_mass.specs import SPECS

PLATFORMS = ["xla", "tpu", "gpu"]


@contextlib.contextmanager
def on(platform):
  """The kernels of a platform, interpreted, with an eye on races."""
  if platform == "xla":
    with kernels.use("xla"):
      yield
    return
  interpret = {
    "tpu": lambda: pltpu.force_tpu_interpret_mode(
      pltpu.InterpretParams(detect_races=True)
    ),
    "gpu": lambda: plgpu.force_gpu_interpret_mode(
      plgpu.InterpretGPUParams(detect_races=True)
    ),
  }
  with interpret[platform](), kernels.use("pallas", platform):
    yield


def wide(x):
  return np.asarray(x, np.float64)


def layer(B, N, K, S, T, D, dtype, shuffled=False):
  """The last S queries of rows of up to T tokens, in slots with holes.

  Padding and empty slots hold NaN. Of two rows the first holds nothing, and the
  second less than T; all keys of the first head are the same.
  """
  rng = np.random.default_rng(S + T)
  places = np.tile(np.arange(T), (B, K, 1))
  if shuffled:
    places = rng.permuted(places, axis=-1)
  query_positions = np.tile(np.arange(T - S, T), (B, 1))
  for row in range(B):
    end = T if B == 1 else (T - S // 2) * row
    places[row][(rng.random((K, T)) < 0.25) | (places[row] >= end)] = -1
    query_positions[row][
      (rng.random(S) < 0.2 * (S > 1)) | (query_positions[row] >= end)
    ] = -1
  keys = rng.normal(size=(B, K, T, D)) * 2
  keys[:, 0] = keys[:, 0, :1]
  keys[places < 0] = np.nan
  queries = rng.normal(size=(B, N, S, D))
  queries[np.broadcast_to((query_positions < 0)[:, None], (B, N, S))] = np.nan
  queries, keys = queries.astype(dtype), keys.astype(dtype)
  # Cast by NumPy: JAX would compile a program for each shape.
  return tuple(
    map(
      jnp.asarray, (queries, keys, np.int32(query_positions), np.int32(places))
    )
  )


def prompt(B, N, K, T, D, dtype):
  """A query for every slot, and which slots are held; others hold NaN."""
  queries, keys, _, places = map(np.array, layer(B, N, K, T, T, D, dtype))
  valid = places >= 0
  queries[np.isnan(queries)] = 1
  queries[~np.repeat(valid, N // K, axis=1)] = np.nan
  return tuple(map(jnp.asarray, (queries, keys, valid)))


def by_hand(queries, keys, sees, scale):
  """Every query by itself, in float64; `sees` tells of a row and KV head."""
  queries, keys = wide(queries), wide(keys)
  B, N, S, _ = queries.shape
  mass = np.zeros((B, N, keys.shape[2]))
  for b, n, s in np.ndindex(B, N, S):
    k = n * keys.shape[1] // N
    slots = np.flatnonzero(sees(b, k, s))
    if len(slots):
      logits = keys[b, k, slots] @ queries[b, n, s] * scale
      weights = np.exp(logits - logits.max())
      mass[b, n, slots] += weights / weights.sum()
  return mass


def causal_by_hand(queries, keys, query_positions, places):
  of, at = np.asarray(query_positions), np.asarray(places)
  return by_hand(
    queries,
    keys,
    lambda b, k, s: (at[b, k] >= 0) & (at[b, k] <= of[b, s]),
    keys.shape[-1] ** -0.5,
  )


def chunks_by_hand(queries, keys, valid, size, scale):
  mask = np.asarray(valid)
  chunk = np.arange(mask.shape[-1]) // size
  return by_hand(
    queries,
    keys,
    lambda b, k, s: mask[b, k] & mask[b, k, s] & (chunk == chunk[s]),
    scale,
  )


def assert_close(actual, expected):
  """To 1e-5 of the largest, which is 1 at least."""
  assert actual.dtype == jnp.float32
  most = max(1.0, np.abs(expected).max())
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * most)


def test_the_references_equal_loops():
  operands = layer(2, 4, 2, 19, 31, 8, "float32")
  actual = jax.jit(causal_mass_reference)(*operands)
  assert_close(actual, causal_by_hand(*operands))

  operands = *prompt(2, 4, 2, 31, 8, "float32"), 7, 0.3
  actual = jax.jit(chunk_mass_reference, static_argnums=(3, 4))(*operands)
  assert_close(actual, chunks_by_hand(*operands))


# B, N, K, S, T, D, the dtype, and whether slots are out of order.
LAYERS = {
  "two rows": (2, 4, 2, 21, 53, 64, "float32", False),
  "one query of eight heads": (1, 8, 1, 1, 101, 128, "bfloat16", False),
  "several tiles": (1, 2, 2, 141, 270, 64, "bfloat16", False),
  "out of order": (1, 2, 1, 66, 133, 256, "bfloat16", True),
}
# B, N, K, T, D, the dtype, and the chunk.
PROMPTS = {
  "short": (2, 2, 1, 53, 64, "bfloat16", 256),
  "chunks": (1, 2, 2, 300, 64, "bfloat16", 128),
  "two heads at a time": (1, 8, 2, 200, 128, "float32", 256),
}


def with_kernels(cases):
  """Every case with every platform that has a kernel for it."""
  return [
    (name, platform)
    for name, sizes in cases.items()
    for platform in PLATFORMS
    # That of GPUs serves no single query.
    if platform != "gpu" or ("bfloat16" in sizes and sizes[3] > 1)
  ]


@pytest.fixture
def small_tiles(monkeypatch, chosen):
  """Several tiles of queries and keys, and several parts of the keys."""
  monkeypatch.setattr(xla, "_LOGITS", 270 * 32)
  monkeypatch.setattr(tpu_chunks, "_LOGITS", 2 * 256**2)
  tiles = {"rows": 64, "slots": 128}
  chosen({"attention_mass/tpu": tiles, "attention_mass/gpu": {"blocks": 2}})


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("name", "platform"), with_kernels(LAYERS))
def test_causal_mass(name, platform):
  queries, *rest = layer(*LAYERS[name])
  run = jax.jit(causal_mass)
  # Logits of any size stay finite. There must be few, and a power of two times
  # larger, lest rounding decides which is the largest.
  for factor in (1, 256) if name == "out of order" else (1,):
    operands = (jnp.asarray(np.asarray(queries) * factor), *rest)
    with on(platform):
      actual = run(*operands)
    assert_close(actual, causal_by_hand(*operands))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("name", "platform"), with_kernels(PROMPTS))
def test_chunk_mass(name, platform):
  *sizes, chunk = PROMPTS[name]
  operands = prompt(*sizes)
  with on(platform):
    actual = jax.jit(lambda *operands: chunk_mass(*operands, chunk, 0.3))(
      *operands
    )
  assert_close(actual, chunks_by_hand(*operands, chunk, 0.3))


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
  ("platform", "dtype"),
  [("tpu", "float32"), ("tpu", "bfloat16"), ("gpu", "bfloat16")],
)
def test_kernels_at_heads_of_every_size(platform, dtype, head_sizes):
  D, G = head_sizes
  operands = layer(2, 2 * G, 2, 35, 147, D, dtype)
  of_chunks = prompt(2, 2 * G, 2, 147, D, dtype)
  with on(platform):
    causal = jax.jit(causal_mass)(*operands)
    chunks = jax.jit(lambda *operands: chunk_mass(*operands, 128, 0.3))(
      *of_chunks
    )
  assert_close(causal, causal_by_hand(*operands))
  assert_close(chunks, chunks_by_hand(*of_chunks, 128, 0.3))


@pytest.mark.parametrize("chunk", [1, 8, 41, 64])
def test_chunks_of_any_size(chunk):
  operands = *prompt(1, 4, 2, 41, 8, "float32"), chunk, 0.3
  actual = jax.jit(chunk_mass, static_argnums=(3, 4))(*operands)
  assert_close(actual, chunks_by_hand(*operands))


@pytest.mark.parametrize("few", [0, 64])
@pytest.mark.parametrize("logits", [1, 53 * 11, 2**19])
def test_the_size_of_the_tiles_does_not_matter(monkeypatch, logits, few):
  monkeypatch.setattr(xla, "_FEW", few)
  operands = layer(1, 2, 1, 51, 53, 8, "float32")
  monkeypatch.setattr(xla, "_LOGITS", logits)
  actual = jax.jit(lambda *operands: causal_mass(*operands))(*operands)
  assert_close(actual, causal_by_hand(*operands))


def test_the_masses_sum_to_the_queries_that_see_a_key():
  queries, keys, *where = layer(1, 3, 1, 29, 31, 8, "float32")
  query_positions, places = map(np.array, where)
  query_positions[0, :2] = 0
  places[places < 2] = -1
  operands = queries, keys, jnp.asarray(query_positions), jnp.asarray(places)
  mass = np.asarray(jax.jit(causal_mass)(*operands))
  first = min(p for p in places.ravel().tolist() if p >= 0)
  some = np.sum(query_positions >= first)
  assert 0 < some < np.sum(query_positions >= 0)
  np.testing.assert_allclose(mass.sum(axis=-1), some, rtol=1e-5)
  assert not np.any(mass[0][:, places[0, 0] < 0])


def test_every_device_of_a_mesh_sums_its_rows_and_heads():
  mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2)
  operands = layer(2, 2, 2, 10, 20, 64, "float32")
  of_chunks = prompt(2, 2, 2, 20, 64, "float32")

  def both(operands, of_chunks):
    return causal_mass(*operands), chunk_mass(*of_chunks, 128, 0.3)

  with on("tpu"), jax.set_mesh(mesh):
    causal, chunks = jax.jit(both)(operands, of_chunks)
  assert_close(causal, causal_by_hand(*operands))
  assert_close(chunks, chunks_by_hand(*of_chunks, 128, 0.3))


@pytest.mark.parametrize(
  ("platform", "dim", "slots", "dtype", "chunk"),
  [
    ("tpu", 64, 200, "float16", 128),
    ("tpu", 64, 2**21 + 1, "bfloat16", 2048),
    ("tpu", 64, 200, "bfloat16", 96),
    ("gpu", 64, 200, "float32", 128),
    ("gpu", 96, 200, "bfloat16", 128),
    ("gpu", 64, 200, "bfloat16", 96),
  ],
)
def test_what_a_kernel_declines(platform, dim, slots, dtype, chunk):
  def shape(*sizes, dtype=dtype):
    return jax.ShapeDtypeStruct((1, 1, *sizes), dtype)

  keys = shape(slots, dim)
  positions = jax.ShapeDtypeStruct((1, 2), "int32")
  places = shape(slots, dtype="int32")
  causal = (shape(2, dim), keys, positions, places)
  of_chunks = functools.partial(chunk_mass, chunk=chunk, scale=1.0)
  uses = [(of_chunks, (keys, keys, shape(slots, dtype="bool")))]
  if chunk != 96:
    uses.append((causal_mass, causal))
  for run, operands in uses:
    with kernels.use(platform=platform):
      assert jax.eval_shape(run, *operands).dtype == jnp.float32
    with kernels.use("pallas", platform), pytest.raises(NotImplementedError):
      jax.eval_shape(run, *operands)


@pytest.mark.parametrize(
  ("dtype", "precision"), [("float32", "HIGHEST"), ("bfloat16", "DEFAULT")]
)
def test_tpus_multiply_exactly(dtype, precision):
  """By default they would round float32 to bfloat16, unlike the interpreter."""
  queries, keys, valid = prompt(1, 1, 1, 20, 64, dtype)
  places = jnp.where(valid, 0, -1)
  with kernels.use("pallas", "tpu"):
    of_chunks = jax.make_jaxpr(chunk_mass, static_argnums=(3, 4))
    programs = [
      jax.make_jaxpr(causal_mass)(queries, keys, places[:, 0], places),
      of_chunks(queries, keys, valid, 128, 0.3),
    ]
  for program in programs:
    assert set(re.findall(r"Precision\.(\w+)", str(program))) == {precision}


def test_gpus_sum_the_weights_of_a_single_query_by_xla():
  operands = layer(*LAYERS["one query of eight heads"])
  with (
    kernels.use("pallas", "gpu"),
    pytest.raises(NotImplementedError, match="a single query"),
  ):
    causal_mass(*operands)
  with kernels.use(platform="gpu"):
    assert_close(causal_mass(*operands), causal_by_hand(*operands))


SERVED = [spec for spec in SPECS if "gpu" in spec.platforms]


@pytest.mark.parametrize("spec", SERVED, ids=lambda spec: spec.name)
def test_real_sizes_are_lowered_for_gpus(spec):
  with kernels.use("pallas", "gpu"):
    traced = jax.jit(lambda *operands: spec.run(*operands)).trace(*spec.shapes)
    lowered = traced.lower(lowering_platforms=("cuda",))
  assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("window", [8, 32])
def test_windows_take_less_memory_than_the_keys(window):
  """Their products begin with keys, which are not transposed."""
  keys = jax.ShapeDtypeStruct((1, 8, 16384, 128), jnp.float32)
  queries = jax.ShapeDtypeStruct((1, 32, window, 128), jnp.float32)
  places = jax.ShapeDtypeStruct((1, 8, 16384), jnp.int32)
  of_queries = jax.ShapeDtypeStruct((1, window), jnp.int32)
  compiled = (
    jax.jit(causal_mass).lower(queries, keys, of_queries, places).compile()
  )
  used = compiled.memory_analysis().temp_size_in_bytes
  assert used < 8 * 16384 * 128 * 4 * 0.6
