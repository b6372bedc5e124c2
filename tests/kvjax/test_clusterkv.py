"""ClusterKV against a float64 loop over the clusters that it made."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.cache.sparse import SparseLayer
from kvjax.clustering import kmeans, nearest
from kvjax.errors import InputError
from kvjax.kernels.attention import attention
from kvjax.retrieval import ClusterKV, KeyBudget, Store
from kvjax.testing import random_activations

LENGTHS = [96, 61, 40, 13]
PADDED = 96
COUNTS = [12, 9, 11, 12]
MOST = 12
STEPS = 5
SMALL = ClusterKV(
  sinks=2, local=3, dense_layers=(), cluster_tokens=8, iterations=100
)
FIXED = dataclasses.replace(SMALL, clusters=20)
CASES = {"by length": SMALL, "as many": FIXED}
HEADS, KV_HEADS, DIM = 6, 3, 8
GROUP = HEADS // KV_HEADS


def softmax(x):
  weights = np.exp(x - x.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def prompt(lengths, padded):
  return random_activations(0, lengths, padded, heads=HEADS, kv_heads=KV_HEADS)


PROMPT = prompt(LENGTHS, PADDED)
BLOCK = random_activations(
  1, [STEPS] * len(LENGTHS), STEPS, heads=HEADS, kv_heads=KV_HEADS
)
BLOCK = dataclasses.replace(
  BLOCK, positions=jnp.asarray(LENGTHS, jnp.int32)[:, None] + BLOCK.positions
)


@functools.partial(jax.jit, static_argnums=0)
def indexed(method, seen, counts):
  layer, cache = jnp.int32(1), LayerCache.of(seen)
  return SparseLayer.of(method, layer, cache, seen, counts, MOST).grow(STEPS)


@jax.jit
def decoded(layer, block):
  layer = layer.append(block)
  return layer.attend(block)


@functools.cache
def made(name):
  return indexed(CASES[name], PROMPT, jnp.asarray(COUNTS, jnp.int32))


@functools.cache
def run():
  layer = made("by length")
  return layer, decoded(layer, BLOCK)[0]


def stored_places(n):
  return [*range(SMALL.sinks, n - SMALL.local)]


def clusters_of(index, row, head):
  """Places in the prompt of each cluster's keys."""
  sizes = np.asarray(index.sizes[row, head])
  slots = np.asarray(index.slots[row, head]) + SMALL.sinks
  return [part.tolist() for part in np.split(slots, np.cumsum(sizes))[:-1]]


def keys_of(row, head):
  return np.asarray(PROMPT.keys[row, head, : LENGTHS[row]], np.float64)


def read_by_hand(query, centroids, clusters, count):
  order = sorted(range(len(clusters)), key=lambda c: -(query @ centroids[c]))
  return [i for c in order for i in clusters[c]][:count]


@pytest.mark.parametrize("row", range(len(LENGTHS)))
@pytest.mark.parametrize("name", CASES)
def test_clusters_are_those_of_k_means(name, row):
  """A fixed point: each key's own mean has the highest cosine with it."""
  layer = made(name)
  stored = stored_places(LENGTHS[row])
  wanted = CASES[name].clusters or max(LENGTHS[row] // 8, 1)
  for head in range(KV_HEADS):
    clusters, keys = clusters_of(layer.index, row, head), keys_of(row, head)
    assert sorted(itertools.chain(*clusters)) == stored
    assert all(members == sorted(members) for members in clusters)
    filled = [c for c, members in enumerate(clusters) if members]
    assert len(filled) == min(wanted, len(stored))
    means = np.array([keys[clusters[c]].mean(axis=0) for c in filled])
    np.testing.assert_allclose(
      layer.index.centroids[row, head][np.array(filled)], means, atol=1e-6
    )
    cosines = unit(keys) @ unit(means).T
    for c, own in enumerate(filled):
      members = clusters[own]
      assert (cosines[members, c] >= cosines[members].max(axis=1) - 1e-6).all()


@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_decoding_equals_the_loop(row):
  layer, output = run()
  n = LENGTHS[row]
  stored = stored_places(n)
  for head, group in itertools.product(range(KV_HEADS), range(GROUP)):
    clusters = clusters_of(layer.index, row, head)
    keys, values = (
      np.concatenate([x[row, head, :n], y[row, head]]).astype(np.float64)
      for x, y in ((PROMPT.keys, BLOCK.keys), (PROMPT.values, BLOCK.values))
    )
    centroids = [keys[c].mean(axis=0) if c else np.zeros(DIM) for c in clusters]
    for step in range(STEPS):
      query = np.asarray(
        BLOCK.queries[row, head * GROUP + group, step], np.float64
      )
      read = read_by_hand(query, centroids, clusters, COUNTS[row])
      if len(stored) <= COUNTS[row]:
        read = stored
      resident = [i for i in range(n + step + 1) if i not in stored]
      both = [*resident, *read]
      weights = softmax(query @ keys[both].T / DIM**0.5)
      np.testing.assert_allclose(
        output[row, head * GROUP + group, step],
        weights @ values[both],
        atol=1e-5,
      )


def test_the_budget_is_filled_with_whole_clusters():
  """All but the last, which gives its lowest slots."""
  layer = made("by length")
  index = jax.tree.map(lambda x: x[1, 2], layer.index)
  clusters = [
    [i - SMALL.sinks for i in members]
    for members in clusters_of(layer.index, 1, 2)
  ]
  store = Store(layer.stored.keys[1, 2], layer.stored.valid[1, 2])
  queries = jax.random.normal(jax.random.key(7), (GROUP, DIM))
  retrieve = jax.jit(
    lambda count: SMALL.retrieve(index, queries, store, KeyBudget(count, 60))[0]
  )
  stored = len(stored_places(LENGTHS[1]))
  for count in range(62):
    lists = np.asarray(retrieve(jnp.asarray(count, jnp.int32)).slots)
    for slots in lists:
      read = [int(i) for i in slots if i >= 0]
      assert len(read) == len({*read}) == min(count, stored)
      cut = [
        members
        for members in clusters
        if 0 < len({*members} & {*read}) < len(members)
      ]
      assert len(cut) <= 1
      for members in cut:
        some = [i for i in members if i in read]
        assert some == members[: len(some)]


def test_a_budget_for_everything_is_dense_attention():
  """In rows whose stored keys all fit; the first one has more of them."""
  layer, before = run()
  counts = jnp.full(len(LENGTHS), 60, jnp.int32)
  # The index does not depend on how much is read.
  output, _ = decoded(dataclasses.replace(layer, count=counts, most=60), BLOCK)
  cache = LayerCache.of(PROMPT).grow(STEPS).append(BLOCK)
  expected = attention(
    BLOCK.queries, cache.keys, cache.values, BLOCK.positions, cache.positions
  )
  np.testing.assert_allclose(output[1:], expected[1:], atol=1e-5)
  assert np.abs(before[1] - expected[1]).max() > 0.01


@pytest.mark.slow
def test_padding_changes_nothing():
  layer, output = run()
  row, n = 1, LENGTHS[1]
  alone = jax.tree.map(lambda x: x[row : row + 1], PROMPT)
  alone = jax.tree.map(
    lambda x: x[:, :n] if x.ndim == 2 else x[:, :, :n], alone
  )
  block = jax.tree.map(lambda x: x[row : row + 1], BLOCK)
  single = indexed(SMALL, alone, jnp.asarray(COUNTS[row : row + 1], jnp.int32))
  for head in range(KV_HEADS):
    made = single.index.sizes.shape[-1]
    assert (
      clusters_of(single.index, 0, head)
      == (clusters_of(layer.index, row, head)[:made])
    )
    assert not layer.index.sizes[row, head, made:].any()
  after, _ = decoded(single, block)
  np.testing.assert_allclose(after[0], output[row], atol=1e-6)


CENTRES = np.random.default_rng(3).normal(size=(5, 16))
TRUTH = np.random.default_rng(4).integers(0, 5, 120)
APART = unit(CENTRES)[TRUTH] * np.random.default_rng(5).uniform(2, 9, (120, 1))
APART += np.random.default_rng(6).normal(size=APART.shape) * 0.05
SEEN = jnp.arange(120) < 100


def fitted(iterations, count=9, wanted=5, keys=APART):
  return kmeans(
    jnp.asarray(keys, jnp.float32),
    SEEN,
    jax.random.key(2),
    count,
    iterations,
    jnp.asarray(wanted, jnp.int32),
  )


def test_k_means_finds_clear_clusters_of_a_number_of_their_own():
  centers, exists = fitted(20)
  assert exists.tolist() == [True] * 5 + [False] * 4
  groups = np.asarray(nearest(jnp.asarray(APART, jnp.float32), centers, exists))
  pairs = {*zip(groups.tolist(), TRUTH.tolist(), strict=True)}
  assert len(pairs) == 5
  for one, other in zip(fitted(20, count=5), fitted(20), strict=True):
    np.testing.assert_allclose(one, other[:5], atol=1e-6)


def test_one_cluster_holds_everything():
  centers, exists = fitted(20, count=1, wanted=1)
  assert exists.tolist() == [True]
  mean = APART[:100].mean(axis=0)
  np.testing.assert_allclose(centers[0], unit(mean), atol=1e-5)


@pytest.mark.parametrize("iterations", [2, 300])
def test_k_means_iterates_as_lloyd_does(iterations):
  """From the same start; the last one until nothing changes."""
  keys = np.random.default_rng(8).normal(size=(120, 16))
  start, exists = fitted(0, keys=keys, wanted=7)
  assert exists.tolist() == [True] * 7 + [False] * 2
  centers = np.asarray(start[:7], np.float64)
  for _ in range(iterations):
    groups = (keys[:100] @ centers.T).argmax(axis=1)
    centers = unit(
      np.array([keys[:100][groups == c].sum(axis=0) for c in range(7)])
    )
  ours, _ = fitted(iterations, keys=keys, wanted=7)
  np.testing.assert_allclose(ours[:7], centers, atol=1e-5)


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    ("clusterkv:clusters=-1", "clusters must be 0 or more; -1 is not."),
    ("clusterkv:cluster_tokens=0", "cluster_tokens must be 1 or more; 0"),
    ("clusterkv:iterations=0", "iterations must be 1 or more; 0 is not."),
    ("clusterkv:probes=4", "has no option 'probes'"),
  ],
)
def test_bad_options_are_one_sentence(name, sentence):
  with pytest.raises(InputError) as raised:
    kvjax.get_retrieval(name)
  assert sentence in str(raised.value)


def test_defaults_are_the_papers():
  method = kvjax.get_retrieval("clusterkv")
  assert (method.sinks, method.local, method.dense_layers) == (16, 0, (0, 1))
