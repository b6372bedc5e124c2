"""Sketches and leverage rows, by every program, against plain float32."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

import kernels
from kernels.sketch import gpu_work, leverage_rows, sketch, tpu
from kernels.sketch.pieces import pieces
from kernels.sketch.reference import leverage_rows_reference, sketch_reference

B, K = 2, 2
PLATFORMS = ["xla", "tpu", "gpu"]

# Tokens, dims, columns, chunk, whether centred, dtype.
CASES = [
  (301, 128, 16, 0, False, "bfloat16"),
  (151, 64, 64, 40, True, "bfloat16"),
  (97, 256, 48, 0, False, "bfloat16"),
  (70, 64, None, 64, True, "float32"),
  (33, 64, 128, 100, False, "float32"),
]


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


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
  """Several tiles per chunk, and several per warpgroup."""
  monkeypatch.setattr(tpu, "_STEP", 1)
  monkeypatch.setattr(gpu_work, "_BLOCKS", 1)


def inputs(length, dim, columns, dtype):
  """Keys with holes that are NaN, and a head that holds nothing."""
  rng = np.random.default_rng(length)
  keys = rng.normal(size=(B, K, length, dim)) + 0.5
  held = rng.random((B, K, length)) < 0.8
  held[1, 0] = False
  held[0, 1, : length // 3] = False
  keys[~held] = np.nan
  factor = None
  if columns:
    factor = rng.normal(size=(K, dim, columns)) * columns**-0.5
    factor = jnp.asarray(factor, jnp.float32)
  return jnp.asarray(keys, dtype), jnp.asarray(held), factor


def assert_close(ours, theirs, tolerance=2e-6):
  """Relative to the largest."""
  atol = tolerance * np.abs(theirs).max()
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case, platform):
  length, dim, columns, chunk, center, dtype = case
  keys, held, factor = inputs(length, dim, columns, dtype)
  theirs = sketch_reference(keys, held, factor, chunk, center)
  rng = np.random.default_rng(0)
  whitener = jnp.asarray(rng.normal(size=theirs.gram.shape), jnp.float32)
  with on(platform):
    ours = sketch(keys, held, factor, chunk, center)
    lengths = leverage_rows(ours, whitener, held, chunk)
  assert_close(ours.rows(held, chunk), theirs.rows(held, chunk))
  assert_close(ours.gram, theirs.gram)
  assert not np.any(np.asarray(ours.gram[1, 0]))
  expected = leverage_rows_reference(theirs, whitener, held, chunk)
  assert_close(lengths, expected)
  assert not np.any(np.where(held, 0.0, lengths))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_mean_of_a_hundred_spreads_does_not_drown_them(platform):
  """Nor does a first token that is far from it."""
  length, dim, columns = 199, 64, 16
  keys, held, factor = inputs(length, dim, columns, "float32")
  keys = keys + 100
  keys = keys.at[:, :, 0].set(0.0)
  with on(platform):
    found = sketch(keys, held, factor, 0, center=True)
  for b, k in [(0, 0), (0, 1), (1, 1)]:
    mask = np.asarray(held[b, k])
    x = np.asarray(keys[b, k], np.float64)[mask]
    x = (x - x.mean(axis=0)) @ np.asarray(factor[k], np.float64)
    assert_close(found.rows(held, 0)[b, k, 0][mask], x, 1e-5)
    assert_close(found.gram[b, k, 0], x.T @ x, 1e-5)


def test_a_mesh_changes_nothing():
  keys, held, factor = inputs(150, 64, 16, "bfloat16")
  axes = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axes)

  def leverage():
    found = sketch(keys, held, factor, 40, center=True)
    return found.gram, leverage_rows(found, found.gram, held, 40)

  with on("tpu"):
    alone = leverage()
    with jax.set_mesh(mesh):
      spread = jax.jit(leverage)()
  jax.tree.map(np.testing.assert_array_equal, alone, spread)


@pytest.mark.parametrize(
  ("platform", "dim", "columns", "dtype"),
  [
    ("tpu", 64, 16, "float16"),
    ("gpu", 64, 16, "float16"),
    ("gpu", 48, 16, "bfloat16"),
    ("gpu", 256, 128, "bfloat16"),
  ],
)
def test_kernels_decline_what_they_do_not_serve(platform, dim, columns, dtype):
  keys, held, factor = inputs(10, dim, columns, dtype)
  with on(platform), pytest.raises(NotImplementedError, match=r"GPU|TPU"):
    sketch(keys, held, factor, 0, center=False)
  with kernels.use(platform=platform):
    found = sketch(keys, held, factor, 0, center=False)
  theirs = sketch_reference(keys, held, factor, 0, center=False)
  assert_close(found.gram, theirs.gram)


def test_pieces_add_up():
  x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
  x = np.concatenate([x, x * 1e20, [0.0, -1.0]]).astype(np.float32)
  parts = [np.asarray(p, np.float64) for p in pieces(jnp.asarray(x))]
  np.testing.assert_array_equal(sum(parts), x)
  for rest, part in zip((x, x - parts[0]), parts, strict=False):
    assert np.all(np.abs(rest - part) <= np.abs(rest) * 2.0**-8)
