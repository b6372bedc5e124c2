"""Compactor against plain loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.allocation import Sizes
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.kernels.attention import AttentionOptions
from kvjax.methods import Compactor, LayerBudget
from kvjax.methods.noncausal import noncausal_attention
from kvjax.prompts import bucket_lengths
from kvjax.testing import TinyModel, kept_positions, random_activations

N, K, D = 4, 2, 8
LENGTH, PADDED = 45, 64
LAYER = jnp.int32(0)


@pytest.fixture(scope="module")
def seen():
  return random_activations(11, [LENGTH], PADDED)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(method, seen, layer=LAYER):
  return method.evaluate(layer, LayerCache.of(seen), seen)


@functools.partial(jax.jit, static_argnums=0)
def select(method, found, seen, budget):
  return method.select(found, LayerCache.of(seen), budget)


def exact(keys):
  """Leverage: diag(U U^T) of the thin SVD in float64."""
  u, s, _ = np.linalg.svd(keys, full_matrices=False)
  u = u[:, s > s.max() * 1e-9]
  return np.sum(u * u, axis=1)


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_attention_of_a_chunk_adds_up_to_its_queries(seen, chunk):
  cache = LayerCache.of(seen)
  values = jnp.where(cache.valid[..., None], cache.values, 0.0)
  masses = noncausal_attention(
    seen.queries,
    cache.keys,
    values,
    cache.valid,
    chunk=chunk,
    options=AttentionOptions(),
    scale="one",
    value_norm="none",
    width=1,
  )
  starts = range(0, LENGTH, chunk)
  sizes = [min(chunk, LENGTH - start) for start in starts]
  for mass in np.asarray(masses[0], np.float64):
    assert not np.any(mass[LENGTH:])
    sums = np.add.reduceat(mass[:LENGTH], starts)
    np.testing.assert_allclose(sums, sizes, rtol=1e-5)


def wide(x, head):
  return np.asarray(x, np.float64)[0, head, :LENGTH]


def standard(x):
  return (x - x.mean()) / x.std()


def test_without_attention_leverage_alone_decides(seen):
  cache = LayerCache.of(seen)
  alone = Compactor(attention="none", sketch="none", blend=0.1)
  found = alone.evaluate(LAYER, cache, seen)
  assert not np.any(found.attention)
  both = dataclasses.replace(alone, attention="noncausal")
  np.testing.assert_array_equal(
    found.outlier, both.evaluate(LAYER, cache, seen).outlier
  )
  with pytest.raises(InputError, match="a blend above 0"):
    Compactor(attention="none", blend=0.0)


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
  found = evaluate(method, seen)
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
  for ours, plain in ((found.attention, attention), (found.outlier, outlier)):
    plain = np.array(plain)
    expected = (
      standard(plain)
      if method.z_scope == "layer"
      else np.array([standard(row) for row in plain])
    )
    np.testing.assert_allclose(ours[0, :, a:b], expected, atol=2e-4)
    assert not np.any(ours[0, :, :a])
    assert not np.any(ours[0, :, b:])


@pytest.mark.slow
def test_scores_that_include_the_ends_and_are_standardized_by_chunk(seen):
  method = Compactor(
    chunk=16,
    sketch="none",
    center=True,
    leverage_chunk=20,
    value_norm="none",
    pool=1,
    z_scope="chunk",
    first=5,
    last=9,
    score_ends=True,
  )
  found = evaluate(method, seen)
  alone = dataclasses.replace(method, first=0, last=0, z_scope="layer")
  whole = evaluate(alone, seen)
  np.testing.assert_array_equal(found.attention, whole.attention)
  for start in range(0, LENGTH, 20):
    part = slice(start, min(start + 20, LENGTH))
    expected = []
    for head in range(K):
      keys = wide(seen.keys_unrotated, head)[part]
      expected.append(exact(keys - keys.mean(axis=0)))
    if start == 40:  # five tokens of eight dimensions: leverage is constant
      assert not np.any(np.asarray(found.outlier[0, :, part]))
      continue
    np.testing.assert_allclose(
      found.outlier[0, :, part], standard(np.array(expected)), atol=2e-4
    )
  allowance = LayerBudget(jnp.asarray([20]), 20)
  for head in np.asarray(select(method, found, seen, allowance))[0]:
    assert set(range(5)) | set(range(LENGTH - 9, LENGTH)) <= set(head.tolist())


def test_chunks_of_the_middle_begin_after_the_first_tokens(seen):
  method = Compactor(
    sketch="none", leverage_chunk=15, z_scope="chunk", first=6, last=4
  )
  found = evaluate(method, seen)
  for start in (6, 21, 36):
    part = slice(start, min(start + 15, LENGTH - 4))
    expected = [exact(wide(seen.keys_unrotated, h)[part]) for h in range(K)]
    flat = part.stop - part.start <= D
    np.testing.assert_allclose(
      found.outlier[0, :, part],
      np.zeros((K, part.stop - start))
      if flat
      else standard(np.array(expected)),
      atol=2e-4,
    )
  assert not np.any(np.asarray(found.outlier[0, :, :6]))
  assert not np.any(np.asarray(found.outlier[0, :, LENGTH - 4 :]))


def test_where_all_tokens_are_among_the_first_nothing_is_scored(seen):
  LayerCache.of(seen)
  found = evaluate(Compactor(first=PADDED), seen)
  assert not np.any(np.asarray(found.attention))
  assert not np.any(np.asarray(found.outlier))


@pytest.mark.parametrize(
  ("share", "length", "kept"),
  [
    (0.5, 1080, 500),
    (0.25, 1081, 251),
    (0.5, 200, 80),  # the ends alone
    (0.1, 80, 80),
    (0.1, 30, 30),
    (1.0, 500, 500),
  ],
)
def test_retention_of_the_middle(share, length, kept):
  method = Compactor(first=16, last=64, retention_of="middle")
  budget, law, sizes = kvjax.Retention(share), method.allocation, Sizes((2, 2))
  one = np.array([length])
  assert law.counts(budget, one, sizes).tolist() == [[kept]] * 2
  most = law.counts(budget, np.array(bucket_lengths(length)), sizes).max(axis=1)
  assert law.capacities(budget, length, sizes).tolist() == most.tolist()
  tokens = law.counts(kvjax.Tokens(90), one, sizes)
  assert tokens.tolist() == [[min(90, length)]] * 2


def test_retention_of_the_middle_in_the_engine():
  model = TinyModel()
  method = Compactor(first=3, last=7, retention_of="middle")
  rows = [list(range(50)), list(range(12)), list(range(8))]
  cache, _ = kvjax.prefill(
    model,
    model.init(),
    kvjax.Prompts.of(rows),
    kvjax.Plan(method, kvjax.Retention(0.3)),
  )
  for row, (length, kept) in enumerate([(50, 12), (12, 10), (8, 8)]):
    for layer in kept_positions(cache, row):
      for places in layer:
        assert len(places) == kept
        ends = {*range(min(3, length)), *range(max(length - 7, 0), length)}
        assert ends <= set(places)


def test_a_layers_heads_share_one_rounding():
  """round(r n g), not g ceil(r n): 12 of 61 tokens at 0.1, not 14."""
  method = Compactor(spread="layer")
  seen = random_activations(3, [61, 44], 64)
  LayerCache.of(seen)
  counts = jnp.asarray([7, 5])
  found = evaluate(method, seen)
  for budget, kept in (
    (kvjax.Retention(0.1), [12, 9]),
    (kvjax.Tokens(7), [14, 14]),
  ):
    lengths, sizes = np.array([61, 44]), Sizes((2,))
    total = method.allocation.totals(budget, lengths, sizes)[0]
    assert total.tolist() == kept
    allowance = LayerBudget(counts, 7, total=jnp.asarray(total))
    slots = select(method, found, seen, allowance)
    assert np.sum(np.asarray(slots) >= 0, axis=(1, 2)).tolist() == kept
  slots = select(method, found, seen, LayerBudget(counts, 7))
  assert np.sum(np.asarray(slots) >= 0, axis=(1, 2)).tolist() == [14, 10]


def test_heads_that_share_a_budget_take_no_other_allocation():
  with pytest.raises(InputError, match="allocation gives each its own: change"):
    kvjax.Plan(
      Compactor(spread="layer"),
      kvjax.Retention(0.1),
      allocation=kvjax.allocation.Uniform(),
    )


def test_blend_is_the_share_removed_where_asked(seen):
  LayerCache.of(seen)
  allowance = LayerBudget(jnp.asarray([9]), 9)
  removed = Compactor(sketch="none", blend_removed=True)
  fixed = dataclasses.replace(removed, blend_removed=False, blend=1 - 9 / 45)
  slots = [
    select(m, evaluate(m, seen), seen, allowance) for m in (removed, fixed)
  ]
  np.testing.assert_array_equal(*slots)


@pytest.mark.parametrize("solver", ["svd", "qr", "eig"])
def test_constant_leverage_leaves_the_choice_to_attention(solver):
  seen = random_activations(12, [6], 8)  # fewer tokens than dimensions
  method = Compactor(sketch="none", solver=solver)
  found = evaluate(method, seen)
  assert not np.any(np.asarray(found.outlier))
  assert np.any(np.asarray(found.attention))


@pytest.mark.slow
def test_sketch_depends_on_layer_head_and_seed_only(seen):
  method = Compactor(sketch_dim=4)
  LayerCache.of(seen)
  one = evaluate(method, seen).outlier
  np.testing.assert_array_equal(one, evaluate(method, seen).outlier)
  assert np.any(one != evaluate(method, seen, jnp.int32(1)).outlier)
  other = evaluate(dataclasses.replace(method, seed=1), seen).outlier
  assert np.any(one != other)


@pytest.mark.parametrize("sketch", ["gaussian", "srht"])
@pytest.mark.parametrize("solver", ["svd", "qr", "eig"])
def test_keys_are_taken_as_they_are_by_a_sketch_as_wide(seen, solver, sketch):
  LayerCache.of(seen)
  exact = evaluate(Compactor(sketch="none", solver=solver), seen)
  for columns in (D, D + 5, 64):
    method = Compactor(sketch=sketch, sketch_dim=columns, solver=solver)
    found = evaluate(method, seen).outlier
    np.testing.assert_array_equal(found, exact.outlier)
  narrow = Compactor(sketch=sketch, sketch_dim=D - 1, solver=solver)
  assert np.any(evaluate(narrow, seen).outlier != exact.outlier)


@pytest.mark.parametrize("preset", ["compactor.kvpress", "compactor.vllm"])
def test_a_wide_sketch_and_the_solver_of_kvpress(seen, preset):
  """Its jitter does not leave leverage as it is; kvpress always sketches."""
  method = kvjax.get_method(preset)
  exact = evaluate(dataclasses.replace(method, sketch="none"), seen).outlier
  found = evaluate(method, seen).outlier
  assert np.any(found != exact) == (preset == "compactor.kvpress")


def test_presets_are_those_of_the_paper_and_of_kvpress():
  paper = kvjax.get_method("compactor.paper")
  assert (paper.blend, paper.sketch_dim, paper.chunk) == (0.3, 64, 256)
  assert (paper.first, paper.last, paper.center) == (0, 0, False)
  theirs = kvjax.get_method("compactor.kvpress")
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
