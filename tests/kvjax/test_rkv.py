"""R-KV: what its paper and its authors' code say, written out in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scoring

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.kernels.attention.options import AttentionOptions
from kvjax.methods import RKV, LayerBudget
from kvjax.testing import TinyModel, kept_positions
from kvjax.testing.checks import all_activations

# The first is more than two tiles of keys, the second more than one.
LENGTHS = [300, 150, 5]
PADDED = 310


def scores(method, activations):
  return np.asarray(scoring.evaluate(method, activations))


def softmax(logits):
  weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def importance(queries, keys, window, kernel, scale=None):
  """I of one KV head; queries [G, n, D], keys [n, D]."""
  n, prefix = len(keys), max(len(keys) - window, 0)
  scale = scale or keys.shape[-1] ** -0.5
  if not prefix:
    return np.zeros(n)
  mean = np.zeros(prefix)
  for at in range(n - window, n):
    logits = [[q[at] @ k * scale for k in keys[:prefix]] for q in queries]
    mean += softmax(np.max(logits, axis=0)) / window
  half = kernel // 2
  pooled = [mean[max(i - half, 0) : i + half + 1].max() for i in range(prefix)]
  return np.append(pooled, np.zeros(n - prefix))


def redundancy(keys, method):
  """R of one KV head."""
  n = len(keys)
  norms = np.linalg.norm(keys, axis=-1)
  cosines = keys @ keys.T / np.outer(norms, norms)
  np.fill_diagonal(cosines, 0)
  for row in cosines:
    similar = [b for b in range(n) if row[b] > method.threshold]
    if method.spared == "last":
      similar.reverse()
    rank = max(int(n * method.spared_share + 1e-9), 1)
    if len(similar) >= rank:
      row[similar[rank - 1]] = 0
    elif method.spares_first:
      row[0] = 0
  return softmax(cosines.mean(axis=0))


def by_the_paper(method, activations, row, length, scale=None):
  queries, keys = (
    np.asarray(x[row, :, :length], np.float64)
    for x in (activations.queries, activations.keys)
  )
  grouped = queries.reshape(len(keys), -1, length, queries.shape[-1])
  return np.stack(
    [
      method.importance * importance(q, k, method.window, method.kernel, scale)
      - (1 - method.importance) * redundancy(k, method)
      for q, k in zip(grouped, keys, strict=True)
    ]
  )


@pytest.mark.parametrize(
  "method",
  [
    RKV(),
    RKV(window=3, kernel=1, importance=0.9, spares_first=False),
    RKV(threshold=0.2, spared="first", importance=0.5),
    pytest.param(RKV(threshold=0.0, spared_share=0.2), marks=pytest.mark.slow),
    pytest.param(
      RKV(threshold=0.0, spared="first", spared_share=0.2),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_scores_are_those_of_the_paper(method):
  activations = all_activations(2, LENGTHS, PADDED)
  ours = scores(method, activations)
  for row, length in enumerate(LENGTHS):
    expected = by_the_paper(method, activations, row, length)
    # Those of the window, which is kept, are of no account.
    prefix = max(length - method.window, 0)
    np.testing.assert_allclose(
      ours[row, :, :prefix], expected[:, :prefix], rtol=0, atol=2e-7
    )
  # Lest the tolerance hide it all: one key too many weighs 5e-6.
  assert np.ptp(ours[0, 0, :290]) > 5e-4


def test_the_scale_of_a_layer_is_its_own():
  activations = all_activations(2, LENGTHS, PADDED)
  scaled = dataclasses.replace(
    activations, attention=AttentionOptions(scale=0.7)
  )
  method = RKV(importance=0.9)
  expected = by_the_paper(method, activations, 0, LENGTHS[0], scale=0.7)
  ours = scores(method, scaled)[0, :, : LENGTHS[0] - 8]
  np.testing.assert_allclose(ours, expected[:, :-8], rtol=0, atol=1e-6)


def with_keys(keys):
  """Activations of one row whose three KV heads have these keys."""
  activations = all_activations(0, [len(keys)], len(keys))
  tiled = np.tile(np.asarray(keys, np.float32), (1, 3, 1, 1))
  return dataclasses.replace(activations, keys=jnp.asarray(tiled))


def redundancies(method, keys):
  found = jax.jit(method.redundancy)(LayerCache.of(with_keys(keys)))
  return np.asarray(found)[0, 0]


def test_of_equal_keys_the_newest_is_the_least_redundant():
  rng = np.random.default_rng(0)
  # Two equal keys, and others that do not resemble them or each other.
  basis = np.linalg.qr(rng.standard_normal((8, 8)))[0]
  keys = basis[[0, 1, 2, 3, 2, 4, 5]]
  method = RKV(window=1, spares_first=False)
  ours = redundancies(method, keys)
  lone = [0, 1, 3, 5, 6]
  np.testing.assert_allclose(ours[lone], ours[0], rtol=1e-6)
  # The last repetition leaves out the first, so that both are as the others;
  # three of them leave the first and the second redundant.
  np.testing.assert_allclose(ours[[2, 4]], [ours[0], ours[0]], rtol=1e-6)
  keys = basis[[0, 1, 2, 3, 2, 4, 2]]
  ours = redundancies(method, keys)
  assert ours[2] > ours[4] > ours[6] - 1e-9


def test_decoding_keeps_what_the_paper_keeps():
  """From the cache as it is just before the eviction, in float64."""
  model = TinyModel(kvjax.Geometry.uniform(1, 4, 2, 8, 4096))
  params, rng = model.init(), np.random.default_rng(0)
  rows = [rng.permutation(64)[:n].tolist() for n in (41, 9)]
  method = RKV(window=5, importance=0.3)

  def decode(count):
    later = kvjax.Plan(
      method, kvjax.Tokens(count), schedule=kvjax.Schedule(every=8)
    )
    plan = kvjax.get_plan("full", kvjax.Retention(1.0), decoding=later)
    prompts = kvjax.Prompts.of(rows)
    cache, logits = kvjax.prefill(model, params, prompts, plan)
    assert kept_positions(cache, 0)[0][0] == list(range(41))
    decoding = kvjax.Decoding(8)
    cache = kvjax.reserve(cache, 64)
    return kvjax.generate(model, params, cache, logits, decoding, keep=True)

  before, after = decode(1000), decode(20)
  assert before.rows() == after.rows()
  layer = before.cache.layers[0]
  for row, length in enumerate((41 + 8, 9 + 8)):
    positions = np.asarray(layer.positions[row, 0])
    keys = np.asarray(layer.keys[row], np.float64)[:, positions >= 0]
    queries = np.zeros((2, 2, length, 8))
    window = np.asarray(layer.window.queries[row], np.float64)
    queries[:, :, -5:] = window.reshape(2, 2, 5, 8)
    found = []
    for own, group in zip(keys, queries, strict=True):
      mixed = 0.3 * importance(group, own, 5, 7) - 0.7 * redundancy(own, method)
      mixed[-5:] = np.inf
      best = np.argsort(-mixed, kind="stable")[:20]
      found.append(sorted(best.tolist()))
    assert kept_positions(after.cache, row) == [found]


def test_a_row_no_longer_than_the_window_stays():
  activations = all_activations(1, [8, 9], 12)
  cache, method = LayerCache.of(activations), RKV()
  found = jnp.asarray(scores(method, activations))
  budget = LayerBudget(jnp.asarray([8, 8]), 12)
  slots = np.asarray(jax.jit(method.select)(found, cache, budget))
  np.testing.assert_array_equal(slots[0, :, :8], [list(range(8))] * 3)
  # The window alone fills the budget.
  np.testing.assert_array_equal(slots[1, :, :8], [list(range(1, 9))] * 3)


def test_memory_is_linear_in_the_tokens():
  """Of the matrix of cosines, a tile of rows is there at a time."""
  method = RKV()

  def used(length):
    shapes = jax.eval_shape(
      lambda: LayerCache.of(all_activations(0, [length], length))
    )
    program = jax.jit(method.redundancy).lower(shapes).compile()
    return program.memory_analysis().temp_size_in_bytes

  assert used(4096) < 2.5 * used(2048)
  assert used(4096) < 3 * 4096**2


@pytest.mark.parametrize(
  "name", ["rkv:window=0", "rkv:kernel=4", "rkv:importance=1.5"]
)
def test_impossible_options_are_refused(name):
  with pytest.raises(InputError, match=r"must be|between"):
    kvjax.get_method(name)
