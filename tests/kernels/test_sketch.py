"""Sketches and leverage rows, by every program, against plain float64."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from kvjax import kernels
from kvjax.kernels.sketch import leverage_rows, sketch
from kvjax.kernels.sketch.pieces import pieces
from kvjax.kernels.sketch.reference import (
  leverage_rows_reference,
  sketch_reference,
)
from kvjax.kernels.sketch.specs import SPECS

B, K = 2, 2
PLATFORMS = ["xla", "tpu", "gpu"]

# Tokens, dims, columns, chunk, whether centered, dtype.
CHUNKED = (100, 64, 64, 40, True, "bfloat16")
CASES = [
  CHUNKED,
  (150, 256, 48, 0, False, "bfloat16"),
  (70, 64, None, 64, True, "float32"),
  (33, 64, 128, 100, False, "float32"),
  (75, 128, 64, 50, True, "float32"),
]
# The most that fit into a GPU's shared memory, and a single token.
WIDE = [
  (129, 128, 128, 0, False, "bfloat16"),
  (129, 128, 64, 64, True, "bfloat16"),
  (101, 128, None, 0, False, "bfloat16"),
  (101, 256, 64, 40, False, "bfloat16"),
  (1, 128, 64, 0, True, "bfloat16"),
]
WIDER = [
  (65, 256, 64, 0, True, "bfloat16"),
  (65, 256, 48, 0, True, "float32"),
  (65, 256, None, 33, False, "float32"),
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
def _small_steps(chosen):
  """Several tiles per chunk, and several per warpgroup."""
  chosen({"sketch/tpu": {"step": 1}, "sketch/gpu": {"blocks": 1}})


def inputs(length, dim, columns, dtype):
  """Keys with holes that are NaN, and a head that holds nothing."""
  rng = np.random.default_rng(length)
  keys = rng.normal(size=(B, K, length, dim)) + 0.5
  valid = rng.random((B, K, length)) < 0.8
  valid[1, 0] = False
  valid[0, 1, : length // 3] = False
  keys[~valid] = np.nan
  factor = None
  if columns:
    factor = rng.normal(size=(K, dim, columns)) * columns**-0.5
    factor = jnp.asarray(factor, jnp.float32)
  return jnp.asarray(keys.astype(dtype)), jnp.asarray(valid), factor


def by_hand(keys, valid, factor, chunk, center, whitener):
  """Rows, Gram matrices and lengths, chunk by chunk."""
  keys, valid = np.asarray(keys, np.float64), np.asarray(valid)
  size = min(chunk or keys.shape[2], keys.shape[2])
  chunks, columns = -(-keys.shape[2] // size), whitener.shape[-1]
  rows = np.zeros((B, K, chunks, size, columns))
  for b, k, c in np.ndindex(B, K, chunks):
    here = slice(c * size, c * size + size)
    (there,) = np.nonzero(valid[b, k, here])
    x = keys[b, k, here][there]
    if center and len(x):
      x = x - x.mean(axis=0)
    rows[b, k, c, there] = x if factor is None else x @ np.float64(factor[k])
  gram = np.swapaxes(rows, -1, -2) @ rows
  whitened = rows @ np.swapaxes(np.float64(whitener), -1, -2)
  lengths = np.sum(whitened**2, axis=-1).reshape(B, K, -1)
  return rows, gram, lengths[..., : keys.shape[2]]


def assert_close(ours, theirs, tolerance=2e-6):
  """Relative to the largest."""
  atol = tolerance * np.abs(theirs).max()
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


def assert_right(case, sketch, leverage_rows):
  """Rows, Gram matrices and lengths of a case are those by hand."""
  length, dim, columns, chunk, center, dtype = case
  keys, valid, factor = inputs(length, dim, columns, dtype)
  width = columns or dim
  chunks = -(-length // min(chunk or length, length))
  rng = np.random.default_rng(0)
  whitener = rng.normal(size=(B, K, chunks, width, width))
  whitener = jnp.asarray(whitener, jnp.float32)

  @jax.jit
  def run(keys, valid, factor, whitener):
    actual = sketch(keys, valid, factor, chunk, center)
    lengths = leverage_rows(actual, whitener, valid, chunk)
    return actual.rows(valid, chunk), actual.gram, lengths

  actual = jax.tree.map(np.asarray, run(keys, valid, factor, whitener))
  expected = by_hand(keys, valid, factor, chunk, center, whitener)
  for ours, theirs in zip(actual, expected, strict=True):
    assert_close(ours, theirs)
  assert not np.any(actual[1][1, 0])
  assert not np.any(np.where(valid, 0.0, actual[2]))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_a_loop(case, platform):
  with on(platform):
    assert_right(case, sketch, leverage_rows)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("platform", "case"),
  [
    *itertools.product(PLATFORMS, WIDE),
    *itertools.product(("xla", "tpu"), WIDER),
  ],
  ids=str,
)
def test_wide_heads_equal_a_loop(platform, case):
  with on(platform):
    assert_right(case, sketch, leverage_rows)


def test_the_reference_equals_a_loop():
  assert_right(CHUNKED, sketch_reference, leverage_rows_reference)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_mean_of_a_hundred_spreads_does_not_drown_them(platform):
  """Nor does a first token that is far from it."""
  length, dim, columns = 130, 64, 16
  keys, valid, factor = inputs(length, dim, columns, "float32")
  keys = np.asarray(keys) + 100
  keys[:, :, 0] = 0.0

  @jax.jit
  def run(keys):
    actual = sketch(keys, valid, factor, 0, center=True)
    return actual.rows(valid, 0), actual.gram

  with on(platform):
    rows, gram = map(np.asarray, run(jnp.asarray(keys)))
  for b, k in [(0, 0), (0, 1), (1, 1)]:
    mask = np.asarray(valid)[b, k]
    x = np.asarray(keys[b, k], np.float64)[mask]
    x = (x - x.mean(axis=0)) @ np.asarray(factor, np.float64)[k]
    assert_close(rows[b, k, 0][mask], x, 1e-5)
    assert_close(gram[b, k, 0], x.T @ x, 1e-5)


def test_every_device_of_a_mesh_has_its_rows_and_heads():
  axes = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axes)
  with on("tpu"), jax.set_mesh(mesh):
    case = (40, 64, 16, 30, True, "bfloat16")
    assert_right(case, sketch, leverage_rows)


@pytest.mark.parametrize(
  ("platform", "dim", "columns", "center", "dtype"),
  [
    ("tpu", 64, 16, False, "float16"),
    ("gpu", 64, 16, False, "float16"),
    ("gpu", 48, 16, False, "bfloat16"),
    ("gpu", 256, 128, False, "bfloat16"),
    ("gpu", 256, 16, True, "bfloat16"),
    ("gpu", 256, 16, False, "float32"),
    ("gpu", 128, 65, True, "bfloat16"),
  ],
)
def test_kernels_decline_what_they_do_not_serve(
  platform, dim, columns, center, dtype
):
  keys, valid, factor = inputs(10, dim, columns, dtype)
  run = functools.partial(sketch, chunk=0, center=center)
  with on(platform), pytest.raises(NotImplementedError, match=r"GPU|TPU"):
    jax.eval_shape(run, keys, valid, factor)
  with kernels.use(platform=platform):
    actual = jax.eval_shape(run, keys, valid, factor)
  assert actual.gram.shape == (B, K, 1, columns, columns)


def test_short_tiles_of_chunks_are_declined_on_gpus():
  keys, valid, factor = inputs(100, 64, 32, "bfloat16")
  for chunk, center in ((37, False), (37, True), (64, False), (0, False)):
    run = functools.partial(sketch, chunk=chunk, center=center)
    declined = chunk == 37 and not center
    with contextlib.ExitStack() as stack:
      stack.enter_context(on("gpu"))
      if declined:
        stack.enter_context(
          pytest.raises(NotImplementedError, match="not chunks of 37")
        )
      jax.eval_shape(run, keys, valid, factor)


def test_specs_compare_columns_without_their_mean():
  keys, _, factor = inputs(128, 64, 64, "float32")
  everywhere = jnp.ones(keys.shape[:3], bool)
  keys = jnp.nan_to_num(keys) + 3
  found = []
  for platform in ("xla", "gpu"):
    with on(platform):
      found.append(sketch(keys, everywhere, factor, 128, True))
  # The kernel has no mean yet when it writes the columns.
  means = [np.abs(one.mean).max() for one in found]
  assert means[0] == 0
  assert means[1] > 1e-3
  compared = [spec.compared for spec in SPECS if "centered" in spec.name]
  for compare in compared:
    for one, other in zip(*map(compare, found), strict=True):
      assert_close(one, other, 1e-5)
  assert compared


def test_pieces_add_up():
  x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
  x = np.concatenate([x, x * 1e20, [0.0, -1.0]]).astype(np.float32)
  parts = [np.asarray(p, np.float64) for p in pieces(jnp.asarray(x))]
  np.testing.assert_array_equal(sum(parts), x)
  for rest, part in zip((x, x - parts[0]), parts, strict=False):
    assert np.all(np.abs(rest - part) <= np.abs(rest) * 2.0**-8)
