"""CTkvr against a float64 loop that follows the paper step by step."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import kernels
from kvjax.cache.layers import LayerCache
from kvjax.cache.sparse import SparseLayer
from kvjax.errors import InputError
from kvjax.kernels.attention import attention
from kvjax.retrieval import CTkvr, ctkvr
from kvjax.retrieval.weights import max_attention
from kvjax.testing import random_activations

LENGTHS = [96, 61, 40, 13]
PADDED = 96
COUNTS = [12, 9, 40, 12]
MOST = 40
STEPS = 9
SMALL = CTkvr(sinks=2, local=5, probes=2)
CASES = {
  "default": SMALL,
  "init": dataclasses.replace(SMALL, choice="init"),
  "equi": dataclasses.replace(SMALL, choice="equi", centroids=3),
  "random": dataclasses.replace(SMALL, choice="random", centroids=3, seed=5),
  "read all": dataclasses.replace(SMALL, rerank=False),
  "frozen": dataclasses.replace(SMALL, update=False),
  "causal": dataclasses.replace(SMALL, causal=True, choice="equi"),
  "mask after": dataclasses.replace(SMALL, mask="after", list_ratio=1.5),
  "many probes": dataclasses.replace(SMALL, probes=50, list_ratio=1.0),
}
HEADS, KV_HEADS, DIM = 6, 3, 8
GROUP = HEADS // KV_HEADS


def softmax(x):
  weights = np.exp(x - x.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


class Loop:
  """One KV head of one row."""

  def __init__(self, method, queries, keys, values, count, chosen):
    self.method, self.count = method, count
    self.keys, self.values = list(keys), list(values)
    self.rho = int(method.list_ratio * count)
    n = len(keys)
    self.resident = [*range(min(method.sinks, n))]
    self.resident += range(max(n - method.local, method.sinks), n)
    self.stored = [i for i in range(n) if i not in self.resident]
    self.ring = []
    for place in chosen:
      past = place + 1 if method.causal else n
      worth = softmax(queries[:, place] @ keys[:past].T / DIM**0.5).max(axis=0)
      best = sorted(range(past), key=lambda i: -worth[i])
      if method.mask == "before":
        best = [i for i in best if i in self.stored][: self.rho]
      best = [i for i in best[: self.rho] if i in self.stored]
      self.ring.append((unit(queries[:, place]), best))
    self.oldest = 0

  def step(self, query, key, value):
    """Decodes a token: what it reads, and what comes of it."""
    self.resident.append(len(self.keys))
    self.keys.append(key)
    self.values.append(value)
    keys, values = np.array(self.keys), np.array(self.values)
    near = [(unit(query) * c).sum(axis=1).max() for c, _ in self.ring]
    nearest = np.argsort(near)[::-1][: self.method.probes]
    recalled = sorted({i for c in nearest for i in self.ring[c][1]})
    worth = softmax(query @ keys[recalled].T / DIM**0.5).max(axis=0)
    ranked = [recalled[i] for i in np.argsort(-worth)]
    read = ranked[: self.count] if self.method.rerank else ranked
    if len(self.stored) <= self.count:
      read = self.stored
    if self.method.update:
      self.ring[self.oldest] = (unit(query), ranked[: self.rho])
      self.oldest = (self.oldest + 1) % len(self.ring)
    both = [*self.resident, *read]
    weights = softmax(query @ keys[both].T / DIM**0.5)
    return sorted(read), weights @ values[both]


def chosen_places(method, n):
  size = method.centroids or max(n // 16, 1)
  size = min(size, n)
  return {
    "final": [*range(n - size, n)],
    "init": [*range(size)],
    "equi": [int(np.float32((i + 0.5) / size) * n) for i in range(size)],
  }[method.choice]


PROMPT = random_activations(0, LENGTHS, PADDED, heads=HEADS, kv_heads=KV_HEADS)
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
def run(name):
  layer = indexed(CASES[name], PROMPT, jnp.asarray(COUNTS, jnp.int32))
  return layer, *decoded(layer, BLOCK)


def loops(name, row, layer):
  method = CASES[name]
  n = LENGTHS[row]
  for head in range(KV_HEADS):
    heads = slice(head * GROUP, (head + 1) * GROUP)
    if method.choice == "random":
      units = np.asarray(layer.index.centroids[row, head, 0], np.float64)
      prompt = unit(np.asarray(PROMPT.queries[row, head * GROUP], np.float64))
      nearest = np.argmax(units @ np.nan_to_num(prompt[:n]).T, axis=1)
      chosen = nearest[: method.centroids].tolist()
      assert chosen == sorted(set(chosen))
    else:
      chosen = chosen_places(method, n)
    yield (
      heads,
      Loop(
        method,
        np.asarray(PROMPT.queries[row, heads, :n], np.float64),
        np.asarray(PROMPT.keys[row, head, :n], np.float64),
        np.asarray(PROMPT.values[row, head, :n], np.float64),
        COUNTS[row],
        chosen,
      ),
    )


@pytest.mark.parametrize("row", range(len(LENGTHS)))
@pytest.mark.parametrize(
  "name",
  [
    # "causal" begins at the same places.
    pytest.param(name, marks=pytest.mark.slow if name == "equi" else ())
    for name in CASES
  ],
)
def test_index_and_decoding_equal_the_loop(name, row):
  layer, output, after = run(name)
  block = [
    np.asarray(x[row], np.float64)
    for x in (BLOCK.queries, BLOCK.keys, BLOCK.values)
  ]
  for head, (heads, loop) in enumerate(loops(name, row, layer)):
    size = int(layer.index.size[row, head])
    assert size == len(loop.ring)
    same_ring(layer.index, row, head, loop, layer.retrieval.sinks)
    for step in range(STEPS):
      _, expected = loop.step(
        block[0][heads, step], block[1][head, step], block[2][head, step]
      )
      np.testing.assert_allclose(output[row, heads, step], expected, atol=1e-5)
    same_ring(after.index, row, head, loop, layer.retrieval.sinks)
    assert int(after.index.oldest[row, head]) == loop.oldest


def same_ring(index, row, head, loop, start):
  for place, (centroid, slots) in enumerate(loop.ring):
    mine = np.asarray(index.slots[row, head, place])
    assert [start + i for i in mine if i >= 0] == sorted(slots)
    np.testing.assert_allclose(
      index.centroids[row, head, :, place], centroid, atol=1e-6
    )
  assert (np.asarray(index.slots[row, head, len(loop.ring) :]) == -1).all()


def test_the_ring_replaces_the_oldest_first():
  layer, _, after = run("default")
  size, oldest = int(layer.index.size[0, 0]), int(after.index.oldest[0, 0])
  assert (size, oldest) == (6, STEPS % 6)
  queries = unit(np.asarray(BLOCK.queries[0, :GROUP]))
  for back in range(size):
    np.testing.assert_allclose(
      after.index.centroids[0, 0, :, (oldest - 1 - back) % size],
      queries[:, STEPS - 1 - back],
      atol=1e-6,
    )


@pytest.mark.slow
def test_all_lists_together_are_dense_attention():
  """C' = C and lists of all stored keys: nothing is left out."""
  method = dataclasses.replace(
    SMALL, probes=PADDED, list_ratio=PADDED, rerank=False, causal=False
  )
  layer = indexed(method, PROMPT, jnp.asarray([1, 1, 1, 1], jnp.int32))
  output, _ = decoded(layer, BLOCK)
  np.testing.assert_allclose(output, dense(), atol=1e-5)


def dense():
  cache = LayerCache.of(PROMPT).grow(STEPS).append(BLOCK)
  return attention(
    BLOCK.queries, cache.keys, cache.values, BLOCK.positions, cache.positions
  )


def test_a_turn_may_be_dense_and_leaves_the_index_alone():
  method = dataclasses.replace(SMALL, turn="dense")
  layer = indexed(method, PROMPT, jnp.asarray(COUNTS, jnp.int32))
  output, after = decoded(layer, BLOCK)
  np.testing.assert_allclose(output, dense(), atol=1e-5)
  jax.tree.map(np.testing.assert_array_equal, layer.index, after.index)


def test_a_turn_of_one_token_is_dense_and_a_decoded_token_is_not():
  first = dataclasses.replace(
    BLOCK,
    queries=BLOCK.queries[:, :, :1],
    keys=BLOCK.keys[:, :, :1],
    values=BLOCK.values[:, :, :1],
    keys_unrotated=None,
    positions=BLOCK.positions[:, :1],
  )
  method = dataclasses.replace(SMALL, turn="dense")
  layer = indexed(method, PROMPT, jnp.asarray(COUNTS, jnp.int32))
  output, _ = decoded(layer, first)
  np.testing.assert_allclose(output, dense()[:, :, :1], atol=1e-5)
  output, _ = decoded(layer, dataclasses.replace(first, decoded=True))
  np.testing.assert_allclose(output, run("default")[1][:, :, :1], atol=1e-5)


def test_padding_of_a_block_changes_nothing():
  counts = jnp.asarray(COUNTS, jnp.int32)
  layer = indexed(SMALL, PROMPT, counts)
  short = dataclasses.replace(
    BLOCK, positions=jnp.where(jnp.arange(STEPS)[None] < 4, BLOCK.positions, -1)
  )
  output, after = decoded(layer, short)
  np.testing.assert_array_equal(output[:, :, :4], run("default")[1][:, :, :4])
  np.testing.assert_array_equal(
    after.index.oldest, np.minimum(4 % np.asarray(layer.index.size), 4)
  )


def test_no_key_is_read_twice():
  layer, _, after = run("default")
  for index in (layer.index, after.index):
    slots = np.sort(np.asarray(index.slots), axis=-1)
    again = (slots[..., 1:] == slots[..., :-1]) & (slots[..., 1:] >= 0)
    assert not again.any()
  resident = np.asarray(layer.resident.positions)
  stored = np.asarray(layer.stored.positions)
  for row, n in enumerate(LENGTHS):
    for head in range(KV_HEADS):
      both = [*resident[row, head], *stored[row, head]]
      assert sorted(p for p in both if p >= 0) == [*range(n)]


def ranking(query, keys):
  """All keys as a query ranks them, by the worth that the lists go by."""
  seen = jnp.ones(len(keys), bool)
  query, keys = (jnp.asarray(x, jnp.float32) for x in (query[None], keys))
  worth = np.asarray(max_attention(query, keys, seen))
  return np.argsort(-worth, kind="stable")


def near_pair(rng, spread):
  one = unit(rng.normal(size=DIM))
  return one, unit(one + spread * rng.normal(size=DIM))


def test_lemma_a_near_queries_rank_alike():
  """Keys that differ by more than 4 sin(angle / 2) keep their order."""
  rng = np.random.default_rng(0)
  keys = unit(rng.normal(size=(200, DIM)))
  tried = 0
  for spread in (0.02, 0.1, 0.3):
    one, other = near_pair(rng, spread)
    angle = np.arccos(np.clip(one @ other, -1, 1))
    gaps = (keys @ one)[:, None] - (keys @ one)[None]
    apart = gaps > 4 * np.sin(angle / 2) + 1e-5
    rank = np.argsort(ranking(other, keys))
    assert (rank[:, None] < rank[None])[apart].all()
    tried += apart.sum()
  assert tried > 1000


def test_lemma_b_few_inversions_change_few_members():
  """t inversions change at most floor(sqrt(t)) members of a top-m set."""
  rng = np.random.default_rng(0)
  keys = unit(rng.normal(size=(60, DIM)))
  most = 0
  for spread in (0.05, 0.3, 1.0):
    one, other = near_pair(rng, spread)
    before, after = ranking(one, keys), ranking(other, keys)
    order = np.argsort(before)[after]
    inversions = sum(int((order[:i] > order[i]).sum()) for i in range(60))
    for m in (5, 20, 40):
      changed = m - len({*before[:m].tolist()} & {*after[:m].tolist()})
      assert changed <= int(inversions**0.5)
      most = max(most, changed)
  assert most > 0


def sizes_of(jaxpr):
  """Elements of everything that a program computes, inner programs too."""
  for equation in jaxpr.eqns:
    for variable in equation.outvars:
      yield math.prod(variable.aval.shape)
    for inner in jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
    ):
      inner = getattr(inner, "jaxpr", inner)
      if hasattr(inner, "eqns"):
        yield from sizes_of(inner)


def largest_array(seen, platform):
  """Entries of the largest array while prompts are indexed."""
  counts = jnp.full(len(seen.positions), 8, jnp.int32)

  def index(seen):
    cache, layer = LayerCache.of(seen), jnp.int32(1)
    return SparseLayer.of(CTkvr(centroids=64), layer, cache, seen, counts, 8)

  with kernels.use("xla", platform):
    return max(sizes_of(jax.make_jaxpr(index)(seen).jaxpr))


@pytest.mark.parametrize(
  ("platform", "bound", "other"),
  [("cpu", "_CPU_LOGITS", "_LOGITS"), ("gpu", "_LOGITS", "_CPU_LOGITS")],
)
def test_lists_are_made_a_few_centroids_at_a_time(
  monkeypatch, platform, bound, other
):
  """Logits of all centroids and keys never exist together."""
  seen = random_activations(0, [256], 256, heads=2, kv_heads=1)
  every = 2 * 64 * 256
  monkeypatch.setattr(ctkvr, other, 0)
  monkeypatch.setattr(ctkvr, bound, 2**17)
  assert largest_array(seen, platform) == every
  monkeypatch.setattr(ctkvr, bound, 1024)
  assert largest_array(seen, platform) < every // 4


def test_rows_share_the_memory_of_logits_on_gpus(monkeypatch):
  monkeypatch.setattr(ctkvr, "_LOGITS", 2**13)
  one, four = (
    random_activations(0, [256] * rows, 256, heads=2, kv_heads=2)
    for rows in (1, 4)
  )
  assert largest_array(one, "gpu") == 2**13 > one.keys.size
  # Those of four rows are as many, which their keys exceed.
  assert largest_array(four, "gpu") == four.keys.size > 2**13


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    ("ctkvr:probes=0", "probes must be 1 or more; 0 is not."),
    ("ctkvr:list_ratio=0.5", "list_ratio must be 1 or more; 0.5 is not."),
    ("ctkvr:list_ratio=1e7", "list_ratio must be 1000 or less; 1e+07 is not."),
    ("ctkvr:centroids=-1", "centroids must be 0 or more; -1 is not."),
    ("ctkvr:choice=last", "choice must be one of final, init, random, equi"),
    ("ctkvr:turn=sparse", "turn must be one of decode, dense; 'sparse' is not"),
    ("ctkvr:dense_layers=-1", "dense_layers are numbers of layers, 0 for"),
    ("ctkrv", "no method 'ctkrv' (did you mean ctkvr"),
  ],
)
def test_bad_options_are_one_sentence(name, sentence):
  with pytest.raises(InputError) as raised:
    kvjax.get_retrieval(name)
  assert sentence in str(raised.value)
