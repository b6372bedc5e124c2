"""Quest against a float64 loop over pages and channels, and its bound."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.activations import Activations
from kvjax.cache import retrieve
from kvjax.cache.layers import LayerCache
from kvjax.cache.sparse import SparseLayer
from kvjax.errors import InputError
from kvjax.heads import Head
from kvjax.kernels.sparse_decode import sparse_decode
from kvjax.registry.names import get_retrieval
from kvjax.retrieval import KeyBudget, Prompt, Quest, ShadowKV, Store
from kvjax.testing import random_activations

LENGTHS = [100, 67, 40, 5]
PADDED = 103
COUNTS = [70, 31, 70, 2]
MOST = 70
HEADS, KV_HEADS, DIM = 6, 3, 8
GROUP = HEADS // KV_HEADS
CASES = {
  "default": Quest(),
  "group": Quest(group="max"),
  "small": Quest(sinks=3, local=6, page=5),
}


def by_hand(method, keys, queries, count):
  """Resident tokens, and those that each head reads."""
  pages, start = [], min(method.sinks, len(keys))
  resident = [*range(start)]
  while start + method.page <= len(keys) - method.local:
    pages.append([*range(start, start + method.page)])
    start += method.page
  resident += range(start, len(keys))
  stored = [*itertools.chain(*pages)]
  if len(stored) <= count:
    return resident, [stored] * len(queries)
  scores = np.zeros((len(queries), len(pages)))
  for j, query in enumerate(queries):
    for p, page in enumerate(pages):
      for channel, q in enumerate(query):
        values = keys[page, channel]
        scores[j, p] += max(q * values.min(), q * values.max())
  if method.group == "max":
    scores[:] = scores.max(axis=0)
  read = []
  for own in scores:
    best = np.argsort(-own)[: max(3, count // method.page)]
    read.append(sorted(t for p in best for t in pages[p]))
  return resident, read


def attended(query, keys, values, both):
  logits = keys[both] @ query / DIM**0.5
  weights = np.exp(logits - logits.max())
  return weights @ values[both] / weights.sum()


def prompt(dtype):
  return random_activations(
    0, LENGTHS, PADDED, heads=HEADS, kv_heads=KV_HEADS, dtype=dtype
  )


def after(seen, queries):
  """A token of each row, whose own key nobody reads."""
  positions = jnp.asarray(LENGTHS, jnp.int32)[:, None]
  keys, values = seen.keys[:, :, :1], seen.values[:, :, :1]
  return Activations(queries[:, :, None], keys, values, positions)


@functools.partial(jax.jit, static_argnums=0)
def looked_up(method, seen, queries):
  counts = jnp.asarray(COUNTS, jnp.int32)
  layer = SparseLayer.of(
    method, jnp.int32(2), LayerCache.of(seen), seen, counts, MOST
  )
  output, _ = layer.attend(after(seen, queries))
  store = Store(layer.stored.keys, layer.stored.valid)
  each = jnp.broadcast_to(counts[:, None], (len(LENGTHS), KV_HEADS))
  grouped = queries.reshape(len(LENGTHS), KV_HEADS, GROUP, DIM)
  found, _ = jax.vmap(jax.vmap(method.retrieve))(
    layer.index, grouped.astype(jnp.float32), store, KeyBudget(each, MOST)
  )
  return output[:, :, 0], found.slots, layer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_reads_what_a_loop_reads(name, dtype):
  method = CASES[name]
  seen = prompt(dtype)
  queries = jax.random.normal(jax.random.key(1), (len(LENGTHS), HEADS, DIM))
  queries = queries.astype(dtype)
  output, slots, layer = looked_up(method, seen, queries)
  lists = 1 if method.group == "max" else GROUP
  assert slots.shape[2] == lists
  for row, n in enumerate(LENGTHS):
    for head in range(KV_HEADS):
      heads = slice(head * GROUP, (head + 1) * GROUP)
      keys, values, own = (
        np.asarray(x, np.float64)
        for x in (
          seen.keys[row, head, :n],
          seen.values[row, head, :n],
          queries[row, heads],
        )
      )
      resident, read = by_hand(method, keys, own, COUNTS[row])
      near = np.asarray(layer.resident.positions[row, head])
      assert sorted(near[near >= 0]) == resident
      for j in range(GROUP):
        mine = np.asarray(slots[row, head, min(j, lists - 1)])
        assert sorted(mine[mine >= 0] + method.sinks) == read[j]
        everything = sorted(resident + read[j]) == [*range(n)]
        assert everything == (row >= 2)
        np.testing.assert_allclose(
          np.asarray(output[row, heads.start + j], np.float64),
          attended(own[j], keys, values, resident + read[j]),
          atol=1e-5 if dtype == "float32" else 2e-2,
        )


def test_the_score_bounds_every_key_of_its_page():
  seen = prompt("bfloat16")
  queries = 3 * jax.random.normal(jax.random.key(2), (4, HEADS, DIM))
  _, _, layer = looked_up(Quest(), seen, queries.astype("bfloat16"))
  for row, n in enumerate(LENGTHS):
    for head in range(KV_HEADS):
      bounds = jax.tree.map(lambda x, at=(row, head): x[at], layer.index)
      largest = np.asarray(bounds.upper_bound(queries[row]))
      assert np.isfinite(largest).all()
      keys = np.asarray(seen.keys[row, head, :n], np.float64)
      products = np.asarray(queries[row], np.float64) @ keys.T
      for page in range((n - 1) // 16):
        most = products[:, page * 16 : page * 16 + 16].max(axis=1)
        assert (largest[:, page] >= most - 1e-4).all()
        # A corner of the box is no key: the bound is not the maximum itself.
        assert (largest[:, page] > most + 0.1).any()


def test_a_ragged_page_uses_its_real_tokens():
  keys = jax.random.normal(jax.random.key(3), (22, 4))
  valid = jnp.arange(22) < 19
  keys = jnp.where(valid[:, None], keys, jnp.nan)
  head = Head(
    cached_keys=keys,
    cached_values=keys,
    positions=jnp.where(valid, jnp.arange(22), -1),
    queries=jnp.zeros((1, 22, 4)),
    query_positions=jnp.arange(22),
  )
  method = Quest(page=8)
  number = jnp.asarray(0)
  reads = KeyBudget(jnp.asarray(3), 3)
  bounds = method.index(Prompt(head, valid, number, 0, 0, 22), reads)
  np.testing.assert_array_equal(bounds.low[2], keys[16:19].min(axis=0))
  np.testing.assert_array_equal(bounds.high[2], keys[16:19].max(axis=0))
  store = Store(keys, valid)
  found, _ = method.retrieve(bounds, jnp.ones((2, 4)), store, reads)
  for slots in np.asarray(found.slots):
    assert sorted(slots[slots >= 0]) == [*range(19)]


@pytest.mark.parametrize("method", [Quest(page=4), ShadowKV(page=4)])
def test_kernels_may_copy_whole_pages(method, monkeypatch):
  sizes = []

  def recorded(*operands, page, **options):
    sizes.append(page)
    return sparse_decode(*operands, page=page, **options)

  monkeypatch.setattr(retrieve, "sparse_decode", recorded)
  queries = jax.random.normal(jax.random.key(1), (len(LENGTHS), HEADS, DIM))
  looked_up.__wrapped__(method, prompt("float32"), queries)
  assert sizes == [4]


def test_first_two_layers_are_dense():
  assert [Quest().is_dense(layer) for layer in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    ("quest:page=0", "page must be 1 or more; 0 is not."),
    ("quest:group=mean", "group must be one of head, max; 'mean' is not."),
  ],
)
def test_bad_options_are_one_sentence(name, sentence):
  with pytest.raises(InputError) as raised:
    get_retrieval(name)
  assert sentence in str(raised.value)
