"""H2O and ChunkKV against plain loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.kernels.attention_mass import causal_mass, xla
from kvjax.methods import H2O, ChunkKV, LayerBudget
from kvjax.model import Geometry
from kvjax.testing import TinyModel, kept_positions, random_activations

N, K, D = 4, 2, 8
LENGTH, PADDED = 43, 48
LAYER = jnp.int32(0)


@pytest.fixture(scope="module")
def seen():
  return random_activations(21, [LENGTH], PADDED)


def wide(x, head):
  return np.asarray(x, np.float64)[0, head, :LENGTH]


def weights(seen, query_head):
  """The whole causal matrix."""
  q, k = wide(seen.queries, query_head), wide(seen.keys, query_head * K // N)
  logits = q @ k.T / np.sqrt(D)
  logits[np.triu_indices(LENGTH, 1)] = -np.inf
  matrix = np.exp(logits - logits.max(axis=1, keepdims=True))
  return matrix / matrix.sum(axis=1, keepdims=True)


def group(head):
  return [j for j in range(N) if j * K // N == head]


@pytest.mark.parametrize("logits", [50, 48 * 9, 2**19])
def test_h2o_sums_the_matrix_without_it(seen, monkeypatch, logits):
  monkeypatch.setattr(xla, "_LOGITS", logits)
  scores = H2O().scores(LAYER, LayerCache.of(seen), seen)[0]
  for head in range(K):
    expected = np.mean([weights(seen, j).sum(0) for j in group(head)], axis=0)
    np.testing.assert_allclose(
      scores[head, :LENGTH], expected, rtol=0, atol=1e-5
    )


def test_h2o_normalized_by_the_queries_that_see_a_token(seen):
  cache = LayerCache.of(seen)
  plain = np.asarray(H2O().scores(LAYER, cache, seen))[0, :, :LENGTH]
  ours = np.asarray(H2O(normalize=True).scores(LAYER, cache, seen))
  expected = plain / np.arange(LENGTH, 0, -1)
  np.testing.assert_allclose(ours[0, :, :LENGTH], expected, rtol=1e-5)


def test_h2o_splits_its_budget(seen):
  cache = LayerCache.of(seen)
  counts = jnp.asarray([[9]])
  for method, recent in ((H2O(), 4), (H2O(recent=6), 6), (H2O(0.0), 0)):
    guarded = method.protected(cache, counts)[0, 0]
    expected = list(range(LENGTH - recent, LENGTH))
    assert np.flatnonzero(guarded).tolist() == expected


def test_h2o_memory_does_not_grow_with_the_square():
  def compiled(length):
    shapes = [
      jax.ShapeDtypeStruct((1, 2, length, D), "float32"),
      jax.ShapeDtypeStruct((1, 1, length, D), "float32"),
      jax.ShapeDtypeStruct((1, length), "int32"),
      jax.ShapeDtypeStruct((1, 1, length), "int32"),
    ]
    return jax.jit(causal_mass).lower(*shapes).compile()

  used = compiled(8192).memory_analysis().temp_size_in_bytes
  assert used < 8192 * 8192 * 4 / 10


@pytest.mark.parametrize("scope", ["layer", "head"])
def test_chunkkv(seen, scope):
  window, chunk, budget = 8, 6, 27
  prefix = LENGTH - window  # 35 tokens: five chunks of 6 and one of 5
  method = ChunkKV(window, chunk, scope)
  cache = LayerCache.of(seen)
  found = method.evaluate(LAYER, cache, seen)
  slots = method.select(found, cache, LayerBudget(jnp.asarray([budget]), 30))
  worth = []
  for head in range(K):
    votes = np.mean([weights(seen, j) for j in group(head)], axis=0)
    votes = votes[-window:].sum(axis=0)[:prefix]
    parts = [votes[i : i + chunk] for i in range(0, prefix, chunk)]
    worth.append([part.mean() * chunk for part in parts])
  worth = np.array(worth)
  if scope == "layer":
    worth = np.repeat(worth.sum(axis=0)[None], K, axis=0)
  for head in range(K):
    best = np.argsort(-worth[head])[: (budget - window) // chunk]
    expected = [
      i
      for c in sorted(best)
      for i in range(c * chunk, min((c + 1) * chunk, prefix))
    ]
    expected += range(prefix, LENGTH)
    assert [int(i) for i in slots[0, head] if i >= 0] == expected


def test_chunkkv_with_less_than_its_window_keeps_the_newest(seen):
  method = ChunkKV(window=8)
  cache = LayerCache.of(seen)
  found = method.evaluate(LAYER, cache, seen)
  slots = method.select(found, cache, LayerBudget(jnp.asarray([5]), 5))
  assert slots[0, 0].tolist() == list(range(LENGTH - 5, LENGTH))


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "ada/", "pyramid/"])
def test_chunkkv_layers_copy_the_first_of_their_group(prefix):
  rng = np.random.default_rng(4)
  prompts = kvjax.Prompts.of(
    [rng.permutation(64)[:n].tolist() for n in (61, 40)]
  )
  plans = [
    kvjax.get_plan(
      f"{prefix}chunkkv:window=4:chunk=3:layer_reuse={n}", kvjax.Tokens(20)
    )
    for n in (1, 2)
  ]
  model = TinyModel(Geometry.uniform(5, 4, 2, 8, 4096))
  (own, copied), _ = kvjax.sweep(model, model.init(), prompts, plans)
  for row in range(2):
    kept, again = kept_positions(own, row), kept_positions(copied, row)
    if prefix != "pyramid/":
      assert kept[0] != kept[1]
      assert again == [kept[n] for n in (0, 0, 2, 2, 4)]
    for layer in (1, 3):  # an upper layer of a pyramid keeps fewer of the same
      for below, above in zip(again[layer - 1], again[layer], strict=True):
        assert set(above) <= set(below)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "ada/", "pyramid/"])
def test_chunkkv_keeps_a_row_that_fits(prefix):
  """Whatever its padding: 25 tokens are no whole number of chunks."""
  plan = kvjax.get_plan(f"{prefix}chunkkv:window=6:chunk=4", kvjax.Tokens(32))
  model = TinyModel()
  params = model.init()
  for width in (32, 64):
    prompts = kvjax.Prompts.of([list(range(25))], width)
    cache, _ = kvjax.prefill(model, params, prompts, plan)
    assert kept_positions(cache, 0) == [[list(range(25))] * 2] * 2
