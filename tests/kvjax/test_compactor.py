"""Compactor: leverage against the SVD, attention against plain loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import LayerCache
from kvjax.errors import InputError
from kvjax.methods import Allowance, Compactor, get_method
from kvjax.methods.leverage import gaussian_sketch, hadamard_sketch, leverage
from kvjax.testing import random_activations

N, K, D = 4, 2, 8
LENGTH, PADDED = 45, 64


@pytest.fixture(scope="module")
def seen():
  return random_activations(11, [LENGTH], PADDED)


def keys_of(seed, count, dim=D):
  return np.random.default_rng(seed).normal(size=(count, dim))


def lev(keys, sketch=None, solver="svd", center=False, padded=0):
  keys = np.pad(np.asarray(keys, np.float32), ((0, padded), (0, 0)))
  held = np.arange(len(keys)) < len(keys) - padded
  return np.asarray(
    leverage(jnp.asarray(keys), jnp.asarray(held), sketch, solver, center)
  )


def exact(keys):
  """diag(U U^T) of the thin SVD in float64."""
  u, s, _ = np.linalg.svd(keys, full_matrices=False)
  u = u[:, s > s.max() * 1e-9]
  return np.sum(u * u, axis=1)


@pytest.mark.parametrize("solver", ["svd", "qr", "eig"])
def test_exact_leverage(solver):
  keys = keys_of(0, 50)
  np.testing.assert_allclose(lev(keys, solver=solver), exact(keys), atol=1e-5)


def test_cholesky_differs_by_its_jitter_only():
  keys = keys_of(0, 50) * 100
  np.testing.assert_allclose(lev(keys, solver="chol"), exact(keys), atol=1e-5)


@pytest.mark.parametrize("solver", ["svd", "qr", "eig"])
def test_sketch_as_wide_as_the_keys_is_exact(solver):
  keys = keys_of(1, 60)
  sketch = gaussian_sketch(jax.random.key(0), D, D)
  np.testing.assert_allclose(lev(keys, sketch, solver), exact(keys), atol=1e-4)


def test_narrow_sketch_is_the_leverage_of_the_sketched_keys():
  keys = keys_of(2, 60)
  for draw in (gaussian_sketch, hadamard_sketch):
    sketch = draw(jax.random.key(1), D, 5)
    assert sketch.shape == (D, 5)
    expected = exact(keys @ np.asarray(sketch, np.float64))
    np.testing.assert_allclose(lev(keys, sketch), expected, atol=1e-5)


def test_hadamard_sketch_is_orthogonal():
  sketch = np.asarray(hadamard_sketch(jax.random.key(2), 16, 6))
  np.testing.assert_allclose(sketch.T @ sketch, 16 * np.eye(6), atol=1e-5)
  assert set(np.unique(sketch)) == {-1.0, 1.0}


@pytest.mark.parametrize("rank", [3, 8])
def test_leverage_sums_to_the_rank(rank):
  keys = keys_of(3, 40, rank) @ keys_of(4, rank)
  np.testing.assert_allclose(lev(keys).sum(), rank, atol=1e-4)


def test_equal_rows_get_equal_scores_and_few_rows_get_one():
  keys = np.repeat(keys_of(5, 10), 3, axis=0)
  scores = lev(keys).reshape(10, 3)
  np.testing.assert_allclose(scores, scores[:, :1] * np.ones(3), atol=1e-6)
  np.testing.assert_allclose(lev(keys_of(6, 4)), np.ones(4), atol=1e-4)


@pytest.mark.parametrize("solver", ["svd", "qr", "eig", "chol"])
def test_padding_and_scale_do_not_matter(solver):
  keys = keys_of(7, 40) * 50
  plain = lev(keys, solver=solver)
  padded = lev(keys, solver=solver, padded=9)
  np.testing.assert_allclose(padded[:40], plain, atol=1e-5)
  assert not np.any(padded[40:])
  np.testing.assert_allclose(lev(keys * 3, solver=solver), plain, atol=1e-4)


def test_centring_removes_a_common_offset():
  keys = keys_of(8, 40)
  np.testing.assert_allclose(
    lev(keys + 5, center=True), exact(keys - keys.mean(0)), atol=1e-4
  )


def test_approximation_keeps_to_its_bound():
  keys = keys_of(9, 200, 32)
  sketch = np.asarray(gaussian_sketch(jax.random.key(3), 32, 24), np.float64)
  approximate, whole = lev(keys, jnp.asarray(sketch, jnp.float32)), exact(keys)
  # The sketched column space lies inside the whole one.
  assert np.all(approximate <= whole + 1e-5)


def wide(x, head):
  return np.asarray(x, np.float64)[0, head, :LENGTH]


def standard(x):
  return (x - x.mean()) / x.std()


@pytest.mark.parametrize(
  "method",
  [
    Compactor(chunk=16, sketch="none"),
    Compactor(chunk=256, sketch="none", scale="rsqrt_d", value_norm="l1"),
    Compactor(chunk=7, sketch="none", value_norm="none", pool=1, blend=0.0),
    Compactor(chunk=16, sketch="none", z_scope="layer", first=8, last=4),
    Compactor(chunk=16, sketch="none", leverage_chunk=20, center=True),
  ],
  ids=["paper", "one chunk", "attention", "ends", "chunked leverage"],
)
def test_scores(seen, method):
  found = method.evaluate(0, LayerCache.of(seen), seen)
  a, b = method.first, LENGTH - method.last
  attention, outlier = [], []
  for head in range(K):
    mass = np.zeros(b - a)
    for j in range(N):
      if j * K // N != head:
        continue
      q, k = wide(seen.queries, j)[a:b], wide(seen.keys, head)[a:b]
      for start in range(0, b - a, method.chunk):
        part = slice(start, min(start + method.chunk, b - a))
        logits = q[part] @ k[part].T
        if method.scale == "rsqrt_d":
          logits /= np.sqrt(D)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        mass[part] += weights.sum(axis=0) * K / N
    assert np.isclose(mass.sum(), b - a)
    values = wide(seen.values, head)[a:b]
    if method.value_norm != "none":
      order = 2 if method.value_norm == "l2" else 1
      mass = mass * np.linalg.norm(values, ord=order, axis=1)
    if method.pool > 1:
      mass = np.convolve(mass, np.ones(method.pool) / method.pool, "same")
    attention.append(mass)
    pre = wide(seen.keys_unrotated, head)[a:b]
    size = method.leverage_chunk or len(pre)
    parts = [pre[i : i + size] for i in range(0, len(pre), size)]
    if method.center:
      parts = [part - part.mean(axis=0) for part in parts]
    outlier.append(np.concatenate([exact(part) for part in parts]))
  for ours, plain in (
    (found.attention, attention),
    (found.outlier, outlier),
  ):
    plain = np.array(plain)
    expected = (
      standard(plain)
      if method.z_scope == "layer"
      else np.array([standard(row) for row in plain])
    )
    np.testing.assert_allclose(ours[0, :, a:b], expected, atol=2e-4)
    assert not np.any(ours[0, :, :a])
    assert not np.any(ours[0, :, b:])


def test_blend_is_the_share_removed_where_asked(seen):
  cache = LayerCache.of(seen)
  allowance = Allowance(jnp.asarray([9]), 9)
  removed = Compactor(sketch="none", blend_removed=True)
  fixed = dataclasses.replace(removed, blend_removed=False, blend=1 - 9 / 45)
  slots = [
    m.select(m.evaluate(0, cache, seen), cache, allowance)
    for m in (removed, fixed)
  ]
  np.testing.assert_array_equal(*slots)


@pytest.mark.parametrize("solver", ["svd", "qr", "eig"])
def test_constant_leverage_leaves_the_choice_to_attention(solver):
  seen = random_activations(12, [6], 8)  # fewer tokens than dimensions
  method = Compactor(sketch="none", solver=solver)
  found = method.evaluate(0, LayerCache.of(seen), seen)
  assert not np.any(np.asarray(found.outlier))
  assert np.any(np.asarray(found.attention))


def test_sketch_depends_on_layer_head_and_seed_only(seen):
  method = Compactor(sketch_dim=4)
  cache = LayerCache.of(seen)
  one = method.evaluate(0, cache, seen).outlier
  np.testing.assert_array_equal(one, method.evaluate(0, cache, seen).outlier)
  assert np.any(one != method.evaluate(1, cache, seen).outlier)
  other = dataclasses.replace(method, seed=1).evaluate(0, cache, seen).outlier
  assert np.any(one != other)


def test_presets_are_those_of_the_paper_and_of_kvpress():
  paper = get_method("compactor.paper")
  assert (paper.blend, paper.sketch_dim, paper.chunk) == (0.3, 64, 256)
  assert (paper.first, paper.last, paper.center) == (0, 0, False)
  theirs = get_method("compactor.kvpress")
  assert (theirs.sketch_dim, theirs.solver, theirs.first) == (48, "chol", 8)


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"chunk": 0}, "chunk must be 1 or more"),
    ({"sketch_dim": 0}, "sketch_dim must be 1 or more"),
    ({"pool": 2}, "pool must be odd"),
    ({"first": -1}, "first must be 0 or more"),
  ],
)
def test_wrong_options_are_explained(options, said):
  with pytest.raises(InputError, match=said):
    Compactor(**options)
