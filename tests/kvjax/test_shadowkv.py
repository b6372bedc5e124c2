"""ShadowKV against a float64 loop over chunks, and its outliers."""

import functools
import itertools

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
from kvjax.retrieval import KeyBudget, Prompt, ShadowKV, Store
from kvjax.testing import random_activations

LENGTHS = [150, 101, 60, 20]
PADDED = 151
COUNTS = [24, 17, 60, 5]
MOST = 60
HEADS, KV_HEADS, DIM = 6, 3, 8
GROUP = HEADS // KV_HEADS
CASES = {
  "two": ShadowKV(outliers=2),
  "none": ShadowKV(outliers=0),
  "small": ShadowKV(outliers=3, sinks=3, local=5, page=5),
  "all": ShadowKV(),
}


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def softmax(x):
  weights = np.exp(x - x.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def by_hand(method, keys, queries, count, dtype):
  """Resident tokens, and those that are read."""
  chunks, start = [], min(method.sinks, len(keys))
  resident = [*range(start)]
  while start + method.page <= len(keys) - method.local:
    chunks.append([*range(start, start + method.page)])
    start += method.page
  resident += range(start, len(keys))
  stored = [*itertools.chain(*chunks)]
  if len(stored) <= count:
    return resident, stored
  means = np.array([keys[chunk].mean(axis=0) for chunk in chunks])
  least = [
    min(unit(keys[token]) @ unit(mean) for token in chunk)
    for chunk, mean in zip(chunks, means, strict=True)
  ]
  outliers = np.argsort(least)[: method.outliers].tolist()
  others = [c for c in range(len(chunks)) if c not in outliers]
  chosen = outliers
  if others:
    landmarks = means[others].astype(dtype).astype(np.float64)
    worth = softmax(queries @ landmarks.T / DIM**0.5).max(axis=0)
    best = np.argsort(-worth)[: count // method.page]
    chosen = chosen + [others[i] for i in best]
  return resident, sorted(t for c in chosen for t in chunks[c])


def after(seen, queries):
  """A token of each row, whose own key nobody reads."""
  positions = jnp.asarray(LENGTHS, jnp.int32)[:, None]
  keys, values = seen.keys[:, :, :1], seen.values[:, :, :1]
  return Activations(queries[:, :, None], keys, values, positions)


@functools.partial(jax.jit, static_argnums=0)
def looked_up(method, seen, queries):
  counts = jnp.asarray(COUNTS, jnp.int32)
  layer = SparseLayer.of(
    method, jnp.int32(0), LayerCache.of(seen), seen, counts, MOST
  )
  output, _ = layer.attend(after(seen, queries))
  store = Store(layer.stored.keys, layer.stored.valid)
  each = jnp.broadcast_to(counts[:, None], (len(LENGTHS), KV_HEADS))
  grouped = queries.reshape(len(LENGTHS), KV_HEADS, GROUP, DIM)
  found, _ = jax.vmap(jax.vmap(method.retrieve))(
    layer.index, grouped.astype(jnp.float32), store, KeyBudget(each, MOST)
  )
  return output[:, :, 0], found.slots[:, :, 0], layer.resident.positions


@pytest.mark.parametrize(
  ("name", "dtype"),
  [*((name, "float32") for name in CASES), ("two", "bfloat16")],
)
def test_reads_what_a_loop_reads(name, dtype):
  method = CASES[name]
  seen = random_activations(
    0, LENGTHS, PADDED, heads=HEADS, kv_heads=KV_HEADS, dtype=dtype
  )
  queries = jax.random.normal(jax.random.key(1), (len(LENGTHS), HEADS, DIM))
  queries = queries.astype(dtype)
  output, slots, near = looked_up(method, seen, queries)
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
      resident, read = by_hand(method, keys, own, COUNTS[row], jnp.dtype(dtype))
      positions = np.asarray(near[row, head])
      assert sorted(positions[positions >= 0]) == resident
      mine = np.asarray(slots[row, head])
      assert sorted(mine[mine >= 0] + method.sinks) == read
      everything = sorted(resident + read) == [*range(n)]
      assert everything == (row >= 2 or name == "all")
      both = resident + read
      expected = softmax(own @ keys[both].T / DIM**0.5) @ values[both]
      np.testing.assert_allclose(
        np.asarray(output[row, heads], np.float64),
        expected,
        atol=1e-5 if dtype == "float32" else 2e-2,
      )


def test_a_chunk_with_a_key_unlike_the_others_is_always_read():
  """Even by queries that turn away from it, with no budget for a chunk."""
  rng = np.random.default_rng(0)
  chunks, page = 10, 8
  keys = np.repeat(unit(rng.normal(size=(chunks, 1, 16))), page, axis=1)
  keys += 0.02 * rng.normal(size=keys.shape)
  keys[2, 5] *= -1
  keys[7, 0] = unit(rng.normal(size=16))
  flat = jnp.asarray(keys.reshape(-1, 16), jnp.float32)
  tokens = jnp.arange(chunks * page)
  valid = jnp.ones(chunks * page, bool)
  head = Head(flat, flat, tokens, flat[None], tokens)
  prompt = Prompt(head, valid, jnp.asarray(0), 0, 0, chunks * page)
  method = ShadowKV(outliers=2)
  queries = np.concatenate([rng.normal(size=(20, 16)), -9 * keys.mean(axis=1)])

  def read(count):
    reads = KeyBudget(jnp.asarray(count), 9)
    index = method.index(prompt, reads)
    return jax.vmap(
      lambda query: method.retrieve(
        index, query[None], Store(flat, valid), reads
      )[0].slots[0]
    )(jnp.asarray(queries, jnp.float32))

  for count, others in ((7, 0), (9, 1)):
    for slots in np.asarray(read(count)):
      found = {int(s) // page for s in slots if s >= 0}
      assert found >= {2, 7}
      assert len(found) == 2 + others


def test_bad_options_are_one_sentence():
  with pytest.raises(InputError) as raised:
    get_retrieval("shadowkv:outliers=-1")
  assert str(raised.value) == "outliers must be 0 or more; -1 is not."
