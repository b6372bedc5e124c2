"""SqueezedAttention against a float64 loop over the clusters that it made."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.layers import LayerCache
from kvjax.cache.sparse import SparseLayer
from kvjax.errors import InputError
from kvjax.kernels.attention import attention
from kvjax.registry.names import get_retrieval
from kvjax.retrieval import KeyBudget, SqueezedAttention, Store
from kvjax.retrieval.clusters import Clusters
from kvjax.retrieval.squeezed import Squeezed
from kvjax.testing import random_activations

LENGTHS = [96, 61, 40, 27]
PADDED = 96
COUNTS = [12, 9, 11, 7]
MOST = 12
STEPS = 9
SMALL = SqueezedAttention(sinks=2, local=3, cluster_tokens=8, window=32)
NOW = dataclasses.replace(SMALL, window=1)
CASES = {"window": SMALL, "now": NOW}
HEADS, KV_HEADS, DIM = 6, 3, 8
GROUP = HEADS // KV_HEADS

PROMPT = random_activations(0, LENGTHS, PADDED, heads=HEADS, kv_heads=KV_HEADS)
BLOCK = random_activations(
  1, [STEPS] * len(LENGTHS), STEPS, heads=HEADS, kv_heads=KV_HEADS
)
BLOCK = dataclasses.replace(
  BLOCK, positions=jnp.asarray(LENGTHS, jnp.int32)[:, None] + BLOCK.positions
)


@functools.partial(jax.jit, static_argnums=0)
def indexed(method, seen, counts):
  return SparseLayer.of(
    method, jnp.int32(1), LayerCache.of(seen), seen, counts, MOST
  ).grow(STEPS)


@jax.jit
def decoded(layer, block):
  layer = layer.append(block)
  return layer.attend(block)


@functools.cache
def run(name):
  layer = indexed(CASES[name], PROMPT, jnp.asarray(COUNTS, jnp.int32))
  return layer, *decoded(layer, BLOCK)


def softmax(x):
  weights = np.exp(x - x.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def clusters_of(index, row, head):
  """Places in the prompt of each cluster's keys, if it has any."""
  sizes = np.asarray(index.clusters.sizes[row, head])
  slots = np.asarray(index.clusters.slots[row, head]) + SMALL.sinks
  parts = np.split(slots, np.cumsum(sizes))[:-1]
  return [part.tolist() for part in parts if len(part)]


def estimates(queries, centroids, sizes):
  """The formula as it stands, on average over the queries."""
  every = []
  for query in queries:
    raised = np.exp(centroids @ query / DIM**0.5)
    every.append(
      raised / sum(n * x for n, x in zip(sizes, raised, strict=True))
    )
  return np.mean(every, axis=0)


def both(name, row, head):
  """What a head of the prompt and of the block holds, in float64."""
  prompt, block = getattr(PROMPT, name), getattr(BLOCK, name)
  whole = [prompt[row, head, : LENGTHS[row]], block[row, head]]
  return np.concatenate(whole).astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("row", range(len(LENGTHS)))
@pytest.mark.parametrize("name", CASES)
def test_decoding_equals_the_loop(name, row):
  layer, output, _ = run(name)
  n, window = LENGTHS[row], CASES[name].window
  stored = range(SMALL.sinks, n - SMALL.local)
  for head, group in itertools.product(range(KV_HEADS), range(GROUP)):
    clusters = clusters_of(layer.index, row, head)
    assert sorted(itertools.chain(*clusters)) == [*stored]
    number = head * GROUP + group
    queries = both("queries", row, number)
    keys, values = both("keys", row, head), both("values", row, head)
    centroids = np.array([keys[members].mean(axis=0) for members in clusters])
    sizes = [len(members) for members in clusters]
    for step in range(STEPS):
      last = queries[: n + step + 1][-window:]
      shares = estimates(last, centroids, sizes)
      assert np.dot(sizes, shares) == pytest.approx(1)
      order = np.argsort(-shares)
      read = [i for c in order for i in clusters[c]][: COUNTS[row]]
      attended = [i for i in range(n + step + 1) if i not in stored] + read
      weights = softmax(queries[n + step] @ keys[attended].T / DIM**0.5)
      np.testing.assert_allclose(
        output[row, number, step], weights @ values[attended], atol=1e-5
      )


@pytest.mark.slow
@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_clusters_gather_directions(row):
  """A fixed point of spherical K-means, however long the keys are."""
  layer, _, _ = run("window")
  for head in range(KV_HEADS):
    clusters = clusters_of(layer.index, row, head)
    assert len(clusters) == max(LENGTHS[row] // 8, 1)
    keys = both("keys", row, head)
    units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    means = np.array([units[members].mean(axis=0) for members in clusters])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    for c, members in enumerate(clusters):
      assert members == sorted(members)
      cosines = units[members] @ means.T
      assert (cosines[:, c] >= cosines.max(axis=1) - 1e-6).all()


@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_the_ring_holds_the_last_queries_in_their_places(row):
  layer, _, after = run("window")
  for index, tokens in (
    (layer.index, LENGTHS[row]),
    (after.index, LENGTHS[row] + STEPS),
  ):
    assert (np.asarray(index.tokens[row]) == tokens).all()
    for head, group in itertools.product(range(KV_HEADS), range(GROUP)):
      queries = both("queries", row, head * GROUP + group)
      ring = index.queries[row, head, group]
      for i in range(max(tokens - SMALL.window, 0), tokens):
        np.testing.assert_array_equal(ring[i % SMALL.window], queries[i])


def test_padding_of_a_block_does_not_move_the_ring():
  layer, output, _ = run("window")
  lengths = jnp.asarray([4, 0, 9, 1], jnp.int32)
  real = jnp.arange(STEPS)[None] < lengths[:, None]
  padded = dataclasses.replace(
    BLOCK, positions=jnp.where(real, BLOCK.positions, -1)
  )
  short, after = decoded(layer, padded)
  for row, length in enumerate(lengths.tolist()):
    np.testing.assert_array_equal(
      short[row, :, :length], output[row, :, :length]
    )
    assert (after.index.tokens[row] == LENGTHS[row] + length).all()
  rings = layer.index.queries[1], after.index.queries[1]
  np.testing.assert_array_equal(*rings)
  moved = np.any(layer.index.queries != after.index.queries, axis=(1, 2, 4))
  assert moved.sum(axis=1).tolist() == lengths.tolist()


@pytest.mark.slow
def test_padding_of_a_prompt_changes_nothing():
  """Not even where the prompt alone is shorter than the ring."""
  layer, output, _ = run("window")
  n = LENGTHS[3]
  assert n < SMALL.window
  alone = jax.tree.map(
    lambda x: x[3:, :n] if x.ndim == 2 else x[3:, :, :n], PROMPT
  )
  single = indexed(SMALL, alone, jnp.asarray(COUNTS[3:], jnp.int32))
  for head in range(KV_HEADS):
    mine, padded = (
      clusters_of(x.index, row, head) for x, row in ((single, 0), (layer, 3))
    )
    assert mine == padded
  rings = single.index.queries[0], layer.index.queries[3]
  np.testing.assert_array_equal(*rings)
  after, _ = decoded(single, jax.tree.map(lambda x: x[3:], BLOCK))
  np.testing.assert_allclose(after[0], output[3], atol=1e-6)


def test_a_budget_for_everything_is_dense_attention():
  """In rows whose stored keys all fit; the first one has more of them."""
  layer, before, _ = run("window")
  counts = jnp.full(len(LENGTHS), 60, jnp.int32)
  # The index does not depend on how much is read.
  output, *_ = decoded(dataclasses.replace(layer, count=counts, most=60), BLOCK)
  cache = LayerCache.of(PROMPT).grow(STEPS).append(BLOCK)
  expected = attention(
    BLOCK.queries, cache.keys, cache.values, BLOCK.positions, cache.positions
  )
  np.testing.assert_allclose(output[1:], expected[1:], atol=1e-5)
  assert np.abs(before[1] - expected[1]).max() > 0.01


def test_large_logits_and_empty_clusters():
  """exp of these logits overflows, or is 0 beside that of an empty cluster."""
  rng = np.random.default_rng(0)
  centroids = rng.normal(size=(6, DIM))
  centroids[:, 0] = rng.uniform(-90, -60, 6)
  centroids[[1, 4]] = 0
  sizes = np.array([3, 0, 5, 2, 0, 7])
  clusters = Clusters(
    jnp.asarray(centroids, jnp.float32),
    jnp.asarray(sizes, jnp.int32),
    jnp.arange(20, dtype=jnp.int32),
  )
  parts = np.split(np.arange(20), np.cumsum(sizes))[:-1]
  store = Store(jnp.full((20, DIM), jnp.nan), jnp.arange(20) < 17)
  for sign in (1, -1):
    asked = rng.normal(size=(4, DIM)) + sign * 30 * np.eye(DIM)[0]
    index = Squeezed(
      clusters, jnp.asarray(asked[None], jnp.float32), jnp.asarray(3, jnp.int32)
    )
    logits = asked @ centroids.T / DIM**0.5
    assert np.abs(logits[:, sizes > 0]).min() > 600
    # All logits of a query less their greatest are the same shares.
    logits[:, sizes == 0] = -np.inf
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = raised / (raised @ sizes)[:, None]
    order = np.argsort(-shares.mean(axis=0), kind="stable")
    expected = np.concatenate([parts[c] for c in order])
    found, _ = SMALL.retrieve(
      dataclasses.replace(index, queries=index.queries.at[:, 3].set(0.0)),
      jnp.asarray(asked[3:], jnp.float32),
      store,
      KeyBudget(jnp.asarray(20, jnp.int32), 20),
    )
    best = int(sizes[order[0]])
    slots = np.asarray(found.slots[0])
    assert slots[:best].tolist() == expected[:best].tolist()
    assert sorted(slots.tolist()) == [-1] * 3 + [*range(17)]


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    ("squeezed:window=0", "window must be 1 or more; 0 is not."),
    ("squeezed:cluster_tokens=0", "cluster_tokens must be 1 or more; 0"),
  ],
)
def test_bad_options_are_one_sentence(name, sentence):
  with pytest.raises(InputError) as raised:
    get_retrieval(name)
  assert sentence in str(raised.value)
