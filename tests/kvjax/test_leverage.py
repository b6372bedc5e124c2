"""Leverage against the SVD in float64, exact and from sketches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods import leverage as leverage_module
from kvjax.methods.leverage import gaussian_sketch, hadamard_sketch, leverage
from kvjax.methods.standardize import standardize

D = 8
EXACT = ("svd", "qr", "eig")
SOLVERS = (*EXACT, "chol")
EPS = float(np.finfo(np.float32).eps)


def keys_of(seed, count, dim=D):
  return np.random.default_rng(seed).normal(size=(count, dim))


def keys_of_condition(seed, count, dim, condition):
  """Keys whose singular values fall from about 3 sqrt(count) by `condition`."""
  rng = np.random.default_rng(seed)
  rank = min(count, dim)
  left = np.linalg.qr(rng.normal(size=(count, rank)))[0]
  right = np.linalg.qr(rng.normal(size=(dim, rank)))[0]
  values = np.geomspace(1, 1 / condition, rank) * (10 * count) ** 0.5
  return np.asarray((left * values) @ right.T, np.float32)


compiled = functools.partial(
  jax.jit, static_argnames=("solver", "center", "chunk")
)(leverage)


def lev(
  keys, sketch=None, solver="svd", center=False, padded=0, chunk=0, run=compiled
):
  """Of one head of one row, whose padding is NaN."""
  valid = np.arange(len(keys) + padded) < len(keys)
  keys = np.pad(
    np.asarray(keys, np.float32), ((0, padded), (0, 0)), constant_values=np.nan
  )
  factor = None if sketch is None else sketch[None]
  ours = run(
    jnp.asarray(keys)[None, None],
    jnp.asarray(valid)[None, None],
    factor,
    solver=solver,
    center=center,
    chunk=chunk,
  )
  return np.asarray(ours[0, 0])


def exact(keys):
  """diag(U U^T) of the thin SVD in float64."""
  u, s, _ = np.linalg.svd(keys, full_matrices=False)
  u = u[:, s > s.max() * 1e-9]
  return np.sum(u * u, axis=1)


@pytest.mark.parametrize("solver", EXACT)
def test_exact_leverage(solver):
  keys = keys_of(0, 50)
  np.testing.assert_allclose(lev(keys, solver=solver), exact(keys), atol=1e-5)


def test_cholesky_differs_by_its_jitter_only():
  keys = keys_of(0, 50) * 100
  np.testing.assert_allclose(lev(keys, solver="chol"), exact(keys), atol=1e-5)


@pytest.mark.slow
def test_without_its_jitter_cholesky_is_exact(monkeypatch):
  monkeypatch.setattr(leverage_module, "_CHOL_JITTER", 0.0)
  keys = keys_of(0, 50)
  ours = lev(keys, solver="chol", run=leverage)
  np.testing.assert_allclose(ours, exact(keys), atol=1e-5)
  sketch = gaussian_sketch(jax.random.key(0), D, D)
  ours = lev(keys, sketch, "chol", run=leverage)
  np.testing.assert_allclose(ours, exact(keys), atol=1e-4)


@pytest.mark.parametrize("solver", EXACT)
def test_sketch_as_wide_as_the_keys_is_exact(solver):
  keys = keys_of(1, 60)
  sketch = gaussian_sketch(jax.random.key(0), D, D)
  np.testing.assert_allclose(lev(keys, sketch, solver), exact(keys), atol=1e-4)
  # The keys are taken as they are.
  np.testing.assert_array_equal(
    lev(keys, sketch, solver), lev(keys, solver=solver)
  )


def test_narrow_sketch_is_the_leverage_of_the_sketched_keys():
  keys = keys_of(2, 60)
  for draw in (gaussian_sketch, hadamard_sketch):
    sketch = draw(jax.random.key(1), D, 5)
    assert sketch.shape == (D, 5)
    expected = exact(keys @ np.asarray(sketch, np.float64))
    np.testing.assert_allclose(lev(keys, sketch), expected, atol=1e-5)


def test_hadamard_sketch_is_orthogonal():
  sketch = np.asarray(hadamard_sketch(jax.random.key(2), 16, 6))
  np.testing.assert_allclose(sketch.T @ sketch, 16 / 6 * np.eye(6), atol=1e-5)
  np.testing.assert_allclose(np.abs(sketch), 6**-0.5, rtol=1e-6)


@pytest.mark.parametrize("rank", [3, 8])
def test_leverage_sums_to_the_rank(rank):
  keys = keys_of(3, 40, rank) @ keys_of(4, rank)
  np.testing.assert_allclose(lev(keys).sum(), rank, atol=1e-4)


def numerical_rank(keys):
  """The rank to the accuracy of float32, from float64 singular values."""
  tolerance = keys.shape[1] ** 0.5 * EPS * np.linalg.norm(keys)
  return np.linalg.matrix_rank(keys, tolerance)


@pytest.mark.parametrize(
  ("columns", "tokens"),
  [
    *[(16, "less"), (16, "many"), (32, "less"), (64, "few"), (64, "many")],
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in [(16, "few"), (32, "few"), (32, "many"), (64, "less")]
    ),
  ],
)
@pytest.mark.parametrize("solver", EXACT)
def test_leverage_of_any_condition_is_that_of_float64(solver, columns, tokens):
  """Each score, and their sum, which is the numerical rank.

  The sketch may be wider than the keys.
  """
  count = {"few": 3, "less": columns - 1, "many": 1000}[tokens]
  sketch = gaussian_sketch(jax.random.key(0), 32, columns)
  for condition in (1, 10, 1e2, 1e3, 1e4):
    keys = keys_of_condition(1, count, 32, condition)
    ours = lev(keys, sketch, solver)
    assert np.all((ours >= 0) & (ours <= 1))
    sketched = np.float64(keys)
    if columns < 32:
      sketched = sketched @ np.float64(sketch)
    rank = numerical_rank(sketched)
    assert rank == min(count, columns, 32)
    np.testing.assert_allclose(ours.sum(), rank, atol=5e-3)
    atol = max(1e-6, EPS * condition)
    np.testing.assert_allclose(ours, exact(sketched), atol=atol)


@pytest.mark.parametrize("solver", EXACT)
@pytest.mark.parametrize(("rank", "smallest"), [(1, 1), (3, 1e-3), (31, 1e-4)])
def test_no_rounding_counts_as_rank(solver, rank, smallest):
  """Rows of a matrix of fewer dimensions than they have, in float32."""
  rng = np.random.default_rng(6)
  left = rng.normal(size=(1000, rank)) * np.geomspace(1, smallest, rank)
  keys = np.asarray(left @ rng.normal(size=(rank, 32)), np.float32)
  assert numerical_rank(np.float64(keys)) == rank
  np.testing.assert_allclose(lev(keys, None, solver).sum(), rank, atol=2e-2)


@pytest.mark.parametrize("solver", EXACT)
@pytest.mark.parametrize("weak", [1e-2, 1e-3, 1e-4])
def test_one_weak_direction_counts_as_much_as_the_others(solver, weak):
  keys = keys_of_condition(1, 1000, 32, 1)
  keys[:, 7] *= np.float32(weak)
  expected = exact(np.float64(keys))
  np.testing.assert_allclose(lev(keys, None, solver), expected, atol=1e-4)


@pytest.mark.parametrize(
  ("columns", "count"),
  [
    *[(16, 1000), (64, 3)],
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in [(16, 3), (32, 3), (32, 1000), (64, 1000)]
    ),
  ],
)
def test_cholesky_is_that_of_kvpress(columns, count):
  """With 1e-2 on the diagonal of the Gram matrix, in float64.

  The scores are in [0, 1] and sum to less than the rank.
  """
  sketch = gaussian_sketch(jax.random.key(0), 32, columns)
  for condition in (1, 10, 1e2, 1e3, 1e4):
    keys = keys_of_condition(1, count, 32, condition)
    sketched = np.float64(keys) @ np.float64(sketch)
    gram = sketched.T @ sketched + 1e-2 * np.eye(columns)
    expected = np.sum(sketched @ np.linalg.inv(gram) * sketched, axis=1)
    ours = lev(keys, sketch, "chol")
    np.testing.assert_allclose(ours, expected, atol=1e-3)
    assert np.all((ours >= 0) & (ours <= 1))
    assert ours.sum() <= min(count, columns, 32) + 1e-3


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_sketch_wider_than_the_keys_changes_nothing(solver):
  keys = keys_of_condition(2, 200, 32, 10)
  sketch = gaussian_sketch(jax.random.key(0), 32, 64)
  np.testing.assert_allclose(
    lev(keys, sketch, solver), exact(np.float64(keys)), atol=1e-3
  )


@pytest.mark.parametrize("scale", [1e-8, 1e-3, 1e3, 1e8])
@pytest.mark.parametrize("solver", EXACT)
def test_guards_are_relative_to_the_keys(solver, scale):
  keys = keys_of_condition(3, 200, 32, 30)
  sketch = gaussian_sketch(jax.random.key(0), 32, 48)
  for factor in (None, sketch):
    whole = lev(keys, factor, solver)
    scaled = lev(keys * np.float32(scale), factor, solver)
    np.testing.assert_allclose(scaled, whole, atol=1e-3)


@pytest.mark.parametrize("scale", [1, 10, 100, 1e5])
def test_cholesky_lifts_what_its_jitter_does_not(scale):
  """Of a singular matrix, in which 1e-2 is less than rounding."""
  keys = keys_of_condition(4, 1000, 32, 10) * np.float32(scale)
  sketch = gaussian_sketch(jax.random.key(0), 32, 48)
  ours = lev(keys, sketch, "chol")
  np.testing.assert_allclose(ours, exact(np.float64(keys)), atol=1e-3)


@pytest.mark.slow
def test_no_solver_finds_anything_in_zeros():
  sketch = gaussian_sketch(jax.random.key(0), D, 5)
  for solver in SOLVERS:
    for factor in (None, sketch):
      assert not np.any(lev(np.zeros((20, D)), factor, solver))


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("count", "copies"), [(31, 1), (47, 1), (20, 30)])
@pytest.mark.parametrize("center", [False, True])
def test_equal_leverage_does_not_stand_out(solver, count, copies, center):
  """Of independent keys, once or all equally often: rounding is no score."""
  sketch = gaussian_sketch(jax.random.key(1), 64, 48)
  for condition in (1, 3, 10):
    keys = keys_of_condition(5, count, 64, condition) * np.float32(1e3)
    keys = np.tile(keys, (copies, 1))
    ours = lev(keys, sketch, solver, center)
    rank = count - center
    np.testing.assert_allclose(ours.sum(), rank, rtol=1e-3)
    scores = jnp.asarray(ours)[None, None]
    z = standardize(scores, jnp.ones(scores.shape, bool), "head")
    np.testing.assert_array_equal(z, 0.0)


def test_scores_of_any_size_are_standardized():
  scores = np.random.default_rng(0).normal(size=(1, 1, 50)) + 3
  where = jnp.ones(scores.shape, bool)
  expected = (scores - scores.mean()) / scores.std()
  for scale in (1e-15, 1.0, 1e15):
    ours = standardize(jnp.asarray(scores * scale), where, "head")
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    same = standardize(jnp.full(scores.shape, scale), where, "head")
    np.testing.assert_array_equal(same, 0.0)


def test_equal_rows_get_equal_scores_and_few_rows_get_one():
  keys = np.repeat(keys_of(5, 10), 3, axis=0)
  scores = lev(keys).reshape(10, 3)
  np.testing.assert_allclose(scores, scores[:, :1] * np.ones(3), atol=1e-6)
  np.testing.assert_allclose(lev(keys_of(6, 4)), np.ones(4), atol=1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("count", [1, 4])
def test_fewer_rows_than_columns_of_the_sketch(solver, count):
  keys = keys_of(6, count, 32) * 100
  sketch = gaussian_sketch(jax.random.key(4), 32, 12)
  ours = lev(keys, sketch, solver, padded=3)
  np.testing.assert_allclose(ours[:count], np.ones(count), atol=1e-3)
  assert not np.any(ours[count:])


@pytest.mark.parametrize(
  ("size", "solver"),
  [(0, "svd"), (7, "svd"), (13, "svd"), (40, "svd"), (64, "svd"), (20, "qr")],
)
def test_leverage_of_chunks_is_that_of_each_chunk_alone(size, solver):
  keys = keys_of(10, 40) + 2
  ours = lev(keys, solver=solver, center=True, padded=8, chunk=size)
  parts = np.split(keys, range(size, 40, size)) if size else [keys]
  expected = [exact(part - part.mean(axis=0)) for part in parts]
  np.testing.assert_allclose(ours[:40], np.concatenate(expected), atol=1e-4)
  assert not np.any(ours[40:])


@pytest.mark.slow
def test_heads_and_rows_stand_alone():
  """Each head has its factor; rows of unequal lengths share them."""
  keys = np.stack([keys_of(seed, 30) for seed in range(4)]).reshape(2, 2, 30, D)
  valid = np.arange(30)[None] < np.array([30, 21])[:, None]
  factors = jnp.stack(
    [gaussian_sketch(jax.random.key(seed), D, 5) for seed in range(2)]
  )
  ours = leverage(
    jnp.asarray(keys, jnp.float32),
    jnp.asarray(np.repeat(valid[:, None], 2, axis=1)),
    factors,
    "svd",
    False,
  )
  for row, length in enumerate((30, 21)):
    for head in range(2):
      alone = lev(keys[row, head, :length], factors[head])
      np.testing.assert_allclose(ours[row, head, :length], alone, atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_padding_and_scale_do_not_matter(solver):
  keys = keys_of(7, 40) * 50
  plain = lev(keys, solver=solver)
  padded = lev(keys, solver=solver, padded=9)
  np.testing.assert_allclose(padded[:40], plain, atol=1e-5)
  assert not np.any(padded[40:])
  np.testing.assert_allclose(lev(keys * 3, solver=solver), plain, atol=1e-4)


def test_centering_removes_a_common_offset():
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
  # What the sketch does to lengths, and the keys' condition, bound the ratio.
  eigenvalues = np.linalg.eigvalsh(keys.T @ keys)
  condition = eigenvalues[-1] / eigenvalues[0]
  stretch = np.linalg.svd(sketch, compute_uv=False) ** 2
  kept = np.sum((keys @ sketch) ** 2, axis=1) / np.sum(keys**2, axis=1)
  ratio = approximate / whole
  assert np.all(ratio >= kept.min() / (stretch.max() * condition))
  assert np.all(ratio <= kept.max() / stretch.min() * condition)
