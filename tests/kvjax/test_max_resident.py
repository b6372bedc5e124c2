"""Resident tokens that CTkvr stores in the long run, against a plain loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.cache.sharding import parse_mesh
from kvjax.cache.sparse import SparseLayer
from kvjax.errors import InputError
from kvjax.kernels.attention import attention
from kvjax.registry.names import get_retrieval
from kvjax.retrieval import CTkvr
from kvjax.testing import TinyModel, layer_positions, random_activations

# The last rows store little or nothing at first, one has too few for sinks.
LENGTHS = [60, 33, 40, 7, 1]
PADDED = 64
COUNTS = [9, 7, 25, 4, 2]
MOST = 25
SINKS, LOCAL, RING = 2, 4, 6
SMALL = CTkvr(sinks=SINKS, local=LOCAL, probes=2, max_resident=SINKS + RING)
CASES = {
  "default": SMALL,
  "past alone, mask after": dataclasses.replace(
    SMALL, causal=True, mask="after", rerank=False, list_ratio=1.5
  ),
}
# How many tokens of each row follow the prompt, block by block.
BLOCKS = [[6, 0, 3, 2, 1], *[[1, 1, 1, 1, 1]] * 5, [1, 0, 1, 1, 1]]
BLOCKS += [[3, 6, 0, 1, 6], *[[1, 1, 1, 1, 1]] * 4]
WIDTHS = [RING if max(lengths) > 1 else 1 for lengths in BLOCKS]
SLOTS = sum(WIDTHS)
# Slots of the ring that the longest rows leave for them.
FREE = RING - LOCAL
HEADS, KV_HEADS, DIM = 4, 2, 8
GROUP = HEADS // KV_HEADS


def softmax(x):
  weights = np.exp(x - x.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


class Loop:
  """One KV head of one row; tokens are named by their positions."""

  def __init__(self, method, queries, keys, values, count):
    self.method, self.count = method, count
    self.keys, self.values = list(keys), list(values)
    n = len(keys)
    self.rho = int(method.list_ratio * count)
    self.sinks = [*range(min(SINKS, n))]
    self.first = max(n - LOCAL, len(self.sinks))
    self.ring = [*range(self.first, n)]
    self.stored = [*range(len(self.sinks), self.first)]
    self.lists = []
    for place in range(n - max(n // 16, 1), n):
      query = queries[:, place]
      ranked = self.ranked(query, range(place + 1 if method.causal else n))
      if method.mask == "before":
        ranked = [i for i in ranked if i not in self.sinks]
      listed = {*ranked[: self.rho]} - {*self.sinks}
      self.lists.append((unit(query), listed))

  def ranked(self, query, places):
    places = list(places)
    if not places:
      return []
    keys = np.array(self.keys)[places]
    worth = softmax(query @ keys.T / DIM**0.5).max(axis=0)
    return [places[i] for i in np.argsort(-worth)]

  def push(self, key, value):
    self.ring.append(len(self.keys))
    self.keys.append(key)
    self.values.append(value)
    if len(self.ring) > RING:
      self.stored.append(self.ring.pop(0))

  def look_up(self, query, place):
    near = [(unit(query) * c).sum(axis=1).max() for c, _ in self.lists]
    nearest = np.argsort(near)[::-1][: self.method.probes]
    recalled = set().union(*(self.lists[c][1] for c in nearest))
    recalled = sorted(recalled & {*self.stored})
    read = self.ranked(query, recalled)
    if self.method.rerank:
      read = read[: self.count]
    if len(self.stored) <= self.count:
      read = self.stored
    ring = [i for i in self.ring if i <= place]
    listed = self.ranked(query, [*recalled, *ring])[: self.rho]
    self.lists = [*self.lists[1:], (unit(query), {*listed})]
    both = [*self.sinks, *ring, *read]
    assert len(both) == len({*both})
    weights = softmax(query @ np.array(self.keys)[both].T / DIM**0.5)
    return weights @ np.array(self.values)[both]

  def named(self, numbers):
    """The tokens that a list of the layer names."""
    base = PADDED - LOCAL - SINKS
    return {
      int(i) + (SINKS if i < base else self.first - base)
      for i in numbers
      if i >= 0
    }


def activations(seed, lengths, padded, dtype="float32"):
  return random_activations(
    seed, lengths, padded, heads=HEADS, kv_heads=KV_HEADS, dtype=dtype
  )


def blocks(dtype="float32"):
  starts = np.array(LENGTHS, np.int32)
  for seed, (lengths, width) in enumerate(zip(BLOCKS, WIDTHS, strict=True)):
    block = activations(seed + 1, lengths, width, dtype)
    positions = block.positions + jnp.asarray(starts)[:, None]
    positions = jnp.where(block.positions >= 0, positions, -1)
    yield dataclasses.replace(block, positions=positions)
    starts = starts + np.array(lengths, np.int32)


@functools.partial(jax.jit, static_argnames=("method", "most"))
def indexed(method, seen, counts, most=MOST):
  return SparseLayer.of(
    method, jnp.int32(1), LayerCache.of(seen), seen, counts, most
  )


@jax.jit
def fed(layer, block):
  layer = layer.append(block)
  return layer.attend(block)


@jax.jit
def fed_densely(layer, block):
  layer = layer.append(block)
  output = attention(
    *(block.queries, layer.keys, layer.values),
    *(block.positions, layer.positions),
  )
  return output, layer


def float64(x, row, heads):
  return np.asarray(x[row, heads], np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_blocks_and_tokens_equal_the_loop(name):
  prompt = activations(0, LENGTHS, PADDED)
  layer = indexed(CASES[name], prompt, jnp.asarray(COUNTS, jnp.int32))
  loops = {
    (row, head): Loop(
      CASES[name],
      float64(prompt.queries, row, slice(head * GROUP, head * GROUP + GROUP))[
        :, :n
      ],
      float64(prompt.keys, row, head)[:n],
      float64(prompt.values, row, head)[:n],
      COUNTS[row],
    )
    for row, n in enumerate(LENGTHS)
    for head in range(KV_HEADS)
  }
  same_state(layer, loops)
  layer = layer.grow(SLOTS - FREE)
  assert int(layer.capacity - layer.next_slot) == SLOTS
  size = layer.resident.nbytes
  for lengths, block in zip(BLOCKS, blocks(), strict=True):
    output, layer = fed(layer, block)
    for (row, head), loop in loops.items():
      heads = slice(head * GROUP, head * GROUP + GROUP)
      start = len(loop.keys)
      for step in range(lengths[row]):
        loop.push(
          float64(block.keys, row, head)[step],
          float64(block.values, row, head)[step],
        )
      for step in range(lengths[row]):
        query = float64(block.queries, row, heads)[:, step]
        expected = loop.look_up(query, start + step)
        np.testing.assert_allclose(
          output[row, heads, step], expected, atol=1e-5
        )
    same_state(layer, loops)
  assert int(layer.next_slot) == layer.capacity
  assert layer.resident.nbytes == size
  assert len(loops[0, 0].stored) > COUNTS[0]
  assert len(loops[3, 0].stored) > COUNTS[3]


def same_state(layer, loops):
  resident, stored = (
    [layer_positions(part, row) for row in range(len(LENGTHS))]
    for part in (layer.resident, layer.stored)
  )
  for (row, head), loop in loops.items():
    assert sorted(resident[row][head]) == loop.sinks + loop.ring
    assert stored[row][head] == loop.stored
    oldest = int(layer.index.oldest[row, head])
    for place, (centroid, listed) in enumerate(loop.lists):
      place = (oldest + place) % len(loop.lists)
      numbers = layer.index.slots[row, head, place]
      assert loop.named(np.asarray(numbers)) == listed
      np.testing.assert_allclose(
        layer.index.centroids[row, head, :, place], centroid, atol=1e-6
      )


# All rows, and the one alone whose prompt does not fill the sinks.
@pytest.mark.slow
@pytest.mark.parametrize(
  ("first", "dtype", "atol"), [(0, "float32", 1e-5), (4, "bfloat16", 2e-2)]
)
def test_who_may_read_everything_attends_to_everything(first, dtype, atol):
  def cut(seen, width):
    return jax.tree.map(
      lambda x: x[first:, :, :width] if x.ndim > 2 else x[first:, :width], seen
    )

  most = PADDED + SLOTS
  prompt = cut(activations(0, LENGTHS, PADDED, dtype), PADDED)
  counts = jnp.full(len(LENGTHS) - first, most, jnp.int32)
  layer = indexed(SMALL, prompt, counts, most=most).grow(SLOTS)
  dense = LayerCache.of(prompt).grow(SLOTS)
  for lengths, block in zip(BLOCKS, blocks(dtype), strict=True):
    block = cut(block, max(lengths[first:]))
    output, layer = fed(layer, block)
    expected, dense = fed_densely(dense, block)
    assert output.dtype == layer.stored.keys.dtype == jnp.dtype(dtype)
    for row, length in enumerate(lengths[first:]):
      np.testing.assert_allclose(
        np.asarray(output[row, :, :length], np.float32),
        np.asarray(expected[row, :, :length], np.float32),
        atol=atol,
      )


MODEL = TinyModel(
  kvjax.Geometry.uniform(
    layers=1, heads=4, kv_heads=2, head_dim=8, max_positions=4096
  )
)
NAME = "ctkvr:sinks=2:local=5:probes=2:max_resident=40"


def conversation(tmp_path=None):
  """Two turns, the cache saved between them where a place is given."""
  params = MODEL.init()
  rng = np.random.default_rng(0)
  rows = [rng.integers(64, size=n).tolist() for n in (60, 44, 3, 52)]
  plan = kvjax.get_plan(NAME, kvjax.Tokens(10))
  cache, _ = kvjax.prefill(MODEL, params, kvjax.Prompts.of(rows), plan)
  cache = kvjax.reserve(cache, 3 * 36)
  resident = cache.layers[0].resident.nbytes
  answers = []
  for turns in ([[5, 6], [7], [1, 2, 3], [9]], [[1], [2] * 9, [8] * 30, [3]]):
    decoding = kvjax.Decoding(4)
    turn = kvjax.Prompts.of(turns)
    answer = kvjax.generate(MODEL, params, cache, turn, decoding, keep=True)
    cache = answer.cache
    answers.append(np.asarray(answer.tokens))
    if tmp_path is not None:
      identity = {"model": MODEL, "model_id": "tiny"}
      kvjax.save_cache(cache, tmp_path / str(len(answers)), **identity)
      cache = kvjax.load_cache(tmp_path / str(len(answers)), **identity)
  assert cache.layers[0].resident.nbytes == resident
  assert all((layer.resident.lengths <= 40).all() for layer in cache.layers)
  return np.stack(answers), np.asarray(cache.lengths)


@pytest.mark.slow
def test_conversations_go_on_saved_or_on_a_mesh(tmp_path):
  answers, lengths = conversation()
  assert lengths[0, :, 0].tolist() == [60 + 11, 44 + 18, 3 + 41, 52 + 10]
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    elsewhere = conversation(tmp_path)
  np.testing.assert_array_equal(answers, elsewhere[0])
  np.testing.assert_array_equal(lengths, elsewhere[1])


@pytest.mark.parametrize(
  ("options", "sentence"),
  [
    ("max_resident=68", "max_resident must be 69 or more, for sinks, local"),
    ("max_resident=-1", "max_resident must be 69 or more, for sinks, local"),
    ("max_resident=99:update=false", "it needs update=true."),
    ("max_resident=99:offload=true", "choose one of the two."),
  ],
)
def test_bad_options_are_one_sentence(options, sentence):
  with pytest.raises(InputError) as raised:
    get_retrieval(f"ctkvr:{options}")
  assert sentence in str(raised.value)


def test_a_turn_must_fit_into_the_ring():
  prompt = activations(0, LENGTHS, PADDED)
  layer = indexed(SMALL, prompt, jnp.asarray(COUNTS, jnp.int32))
  block = activations(1, [1] * len(LENGTHS), RING + 1)
  with pytest.raises(InputError, match="A turn of 7 tokens, padding included"):
    jax.eval_shape(fed, layer.grow(9), block)
