"""MagicPIG against float64 loops and the binomial law; its estimates."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.cache.sparse import SparseLayer
from kvjax.errors import InputError
from kvjax.heads import Head
from kvjax.registry.names import get_retrieval
from kvjax.retrieval import KeyBudget, MagicPIG, Prompt, Store
from kvjax.retrieval.magicpig import sampled_share
from kvjax.testing import random_activations

LENGTHS = [60, 47, 20, 5]
PADDED = 61
COUNTS = [9, 9, 14, 2]
MOST = 14
HEADS, KV_HEADS, DIM = 6, 3, 8
GROUP = HEADS // KV_HEADS
SMALL = MagicPIG(sinks=2, local=5, bits=3, tables=8)


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def share(cosine, bits, tables):
  """Of two or more successes among as many tries as there are tables."""
  one = (1 - np.arccos(cosine) / np.pi) ** bits
  return sum(
    math.comb(tables, i) * one**i * (1 - one) ** (tables - i)
    for i in range(2, tables + 1)
  )


def by_hand(planes, keys, query):
  """Which keys a head samples, and what being sampled adds to each logit."""
  centered = keys - keys.mean(axis=0) if len(keys) else keys
  sampled = []
  for slot, key in enumerate(centered):
    met = sum(all((key @ p >= 0) == (query @ p >= 0)) for p in planes)
    if met >= 2:
      sampled.append(slot)
  w = share(unit(centered) @ unit(query), SMALL.bits, SMALL.tables)
  return sampled, -np.log(w + 1e-4)


def after(seen, queries):
  """A token of each row, whose own key nobody reads."""
  positions = jnp.asarray(LENGTHS, jnp.int32)[:, None]
  keys, values = seen.keys[:, :, :1], seen.values[:, :, :1]
  return Activations(queries[:, :, None], keys, values, positions)


@functools.partial(jax.jit, static_argnums=0)
def looked_up(method, seen, queries):
  counts = jnp.asarray(COUNTS, jnp.int32)
  layer = SparseLayer.of(
    method, jnp.int32(1), LayerCache.of(seen), seen, counts, MOST
  )
  output, _ = layer.attend(after(seen, queries))
  store = Store(layer.stored.keys, layer.stored.valid)
  each = jnp.broadcast_to(counts[:, None], (len(LENGTHS), KV_HEADS))
  grouped = queries.reshape(len(LENGTHS), KV_HEADS, GROUP, DIM)
  found, _ = jax.vmap(jax.vmap(method.retrieve))(
    layer.index, grouped.astype(jnp.float32), store, KeyBudget(each, MOST)
  )
  return output[:, :, 0], found, layer.index


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_samples_and_weighs_what_a_loop_does(dtype):
  seen = random_activations(
    0, LENGTHS, PADDED, heads=HEADS, kv_heads=KV_HEADS, dtype=dtype
  )
  queries = jax.random.normal(jax.random.key(1), (len(LENGTHS), HEADS, DIM))
  queries = queries.astype(dtype)
  output, found, index = looked_up(SMALL, seen, queries)
  start = SMALL.sinks
  for row, n in enumerate(LENGTHS):
    end = max(n - SMALL.local, start)
    for head in range(KV_HEADS):
      keys, values = (
        np.asarray(x[row, head, :n], np.float64)
        for x in (seen.keys, seen.values)
      )
      planes = np.asarray(index.planes[row, head], np.float64)
      union = set()
      for j in range(GROUP):
        number = head * GROUP + j
        query = np.asarray(queries[row, number], np.float64)
        sampled, weight = by_hand(planes, keys[start:end], query)
        (mine,) = np.isfinite(found.bias[row, head, j]).nonzero()
        assert mine.tolist() == sampled
        np.testing.assert_allclose(
          found.bias[row, head, j, mine], weight[sampled], atol=1e-4
        )
        union.update(sampled)
        bias = np.zeros(n)
        if end - start > COUNTS[row]:
          assert 0 < len(sampled) < end - start
          bias[start:end] = -np.inf
          bias[start:end][sampled] = weight[sampled]
        logits = keys @ query / DIM**0.5 + bias
        weights = np.exp(logits - logits.max())
        np.testing.assert_allclose(
          np.asarray(output[row, number], np.float64),
          weights @ values / weights.sum(),
          atol=1e-5 if dtype == "float32" else 2e-2,
        )
      listed = np.asarray(found.slots[row, head, 0])
      assert listed[listed >= 0].tolist() == sorted(union)


@pytest.mark.parametrize(("bits", "tables"), [(9, 120), (8, 75), (10, 150)])
def test_the_share_is_the_binomial_law(bits, tables):
  angles = np.linspace(0, np.pi, 500)
  w = np.asarray(sampled_share(jnp.cos(angles), bits, tables), np.float64)
  expected = share(np.cos(angles), bits, tables)
  np.testing.assert_allclose(w, expected, rtol=1e-3, atol=1e-7)
  assert w.min() >= 0
  assert w.max() <= 1
  # It falls with the angle, so that it rises with p.
  assert (np.diff(w) <= 1e-6).all()
  assert w[0] == 1
  assert w[-1] == 0


DRAWS = 3000


@jax.jit
def drawn(keys, queries):
  """What many independent draws of directions sample."""
  tokens = jnp.arange(len(keys), dtype=jnp.int32)
  valid = jnp.ones(len(keys), bool)
  head = Head(keys, keys, tokens, keys[None], tokens)
  reads = KeyBudget(jnp.asarray(1), 1)

  def bias(number):
    prompt = Prompt(head, valid, number, 1, 0, len(keys))
    index = SMALL.index(prompt, reads)
    return SMALL.retrieve(index, queries, Store(keys, valid), reads)[0].bias

  return jax.lax.map(bias, jnp.arange(DRAWS), batch_size=500)


@functools.cache
def sample():
  rng = np.random.default_rng(0)
  keys = rng.normal(size=(12, DIM)) + rng.normal(size=DIM)
  queries = rng.normal(size=(2, DIM))
  bias = drawn(*(jnp.asarray(x, jnp.float32) for x in (keys, queries)))
  return keys, queries, np.asarray(bias, np.float64)


def test_keys_are_sampled_as_often_as_their_share_says():
  keys, queries, bias = sample()
  cosine = unit(queries) @ unit(keys - keys.mean(axis=0)).T
  expected = share(cosine, SMALL.bits, SMALL.tables)
  assert expected.min() < 0.1
  assert expected.max() > 0.6
  # Four standard deviations of a share among so many draws.
  np.testing.assert_allclose(
    np.isfinite(bias).mean(axis=0), expected, atol=2 / DRAWS**0.5
  )


def test_the_mean_estimate_is_dense_attention():
  keys, queries, bias = sample()
  values = np.random.default_rng(1).normal(size=keys.shape)
  logits = queries @ keys.T / DIM**0.5
  exact = np.exp(logits)
  estimated = np.exp(logits[None] + bias)
  total = exact.sum(axis=-1)
  np.testing.assert_allclose(
    estimated.sum(axis=-1).mean(axis=0), total, rtol=0.05
  )
  np.testing.assert_allclose(
    (estimated @ values).mean(axis=0), exact @ values, atol=0.05 * total.max()
  )
  # Without the correction the share of what is sampled is missing.
  sampled = np.where(np.isfinite(bias), exact[None], 0.0)
  assert (sampled.sum(axis=-1).mean(axis=0) < 0.8 * total).all()


def test_a_query_along_a_centered_key_finds_it():
  """All signs agree, whatever their number, so that it counts as itself."""
  rng = np.random.default_rng(2)
  keys = jnp.asarray(rng.normal(size=(30, DIM)), jnp.float32)
  method = dataclasses.replace(SMALL, bits=20, tables=2)
  tokens, valid = jnp.arange(30), jnp.ones(30, bool)
  head = Head(keys, keys, tokens, keys[None], tokens)
  reads = KeyBudget(jnp.asarray(1), 1)
  index = method.index(Prompt(head, valid, tokens[0], 1, 0, 30), reads)
  queries = 5 * (keys - jnp.mean(keys, axis=0, keepdims=True))
  sides = np.asarray(queries) @ np.asarray(index.planes) >= 0
  np.testing.assert_array_equal(index.codes, sides @ 2 ** np.arange(20))
  found, _ = method.retrieve(index, queries, Store(keys, valid), reads)
  bias = np.asarray(found.bias)
  assert (np.isfinite(bias) == np.eye(30, dtype=bool)).all()
  np.testing.assert_allclose(np.diag(bias), 0.0, atol=0.02)


def test_the_seed_fixes_the_draw():
  keys = jnp.ones((4, DIM))
  head = Head(keys, keys, jnp.arange(4), keys[None], jnp.arange(4))

  def planes(seed, layer, number):
    prompt = Prompt(head, keys[:, 0] > 0, jnp.asarray(number), layer, 0, 4)
    method = dataclasses.replace(SMALL, seed=seed)
    return np.asarray(method.index(prompt, KeyBudget(jnp.asarray(1), 1)).planes)

  first = planes(0, 1, 0)
  np.testing.assert_array_equal(first, planes(0, 1, 0))
  for other in ((1, 1, 0), (0, 2, 0), (0, 1, 1)):
    assert (first != planes(*other)).mean() > 0.9


def test_every_sixteenth_layer_is_dense():
  def dense(name):
    method = get_retrieval(name)
    return [layer for layer in range(40) if method.is_dense(layer)]

  assert dense("magicpig") == [0, 16, 32]
  assert dense("magicpig.8x75:dense_layers=3") == [0, 3, 16, 32]
  assert dense("magicpig:dense_every=0:dense_layers=3") == [3]


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    ("magicpig:bits=32", "bits must be 31 or less; 32 is not."),
    ("magicpig:bits=0", "bits must be 1 or more; 0 is not."),
    ("magicpig:tables=1", "tables must be 2 or more; 1 is not."),
  ],
)
def test_bad_options_are_one_sentence(name, sentence):
  with pytest.raises(InputError) as raised:
    get_retrieval(name)
  assert str(raised.value) == sentence
