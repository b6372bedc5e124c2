"""Methods that select once for all layers, TriAttention's choices first.

They are compared with loops over layers, heads and tokens in float64.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from made_up_statistics import made_up_statistics
from mesh_answers import answered, assert_same

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.engine.capacity import prepare_decoding
from kvjax.engine.evicting import evict_all
from kvjax.engine.feed import feed
from kvjax.engine.joining import select_joined
from kvjax.errors import InputError
from kvjax.methods import (
  Chunked,
  Critical,
  H2O,
  KeyDiff,
  LayerBudget,
  ScoringMethod,
  TriAttention,
  WholeChunks,
)
from kvjax.model import Geometry, LayerSpec
from kvjax.testing import TinyModel, check_method, kept_positions

HEADS, KV_HEADS, DIM = 4, 2, 8
GROUP, HALF = HEADS // KV_HEADS, DIM // 2
SPEEDS = 100.0 ** (-np.arange(HALF) / HALF)
FARTHEST = 64
# Two stacks that evict, and one of windows that does not.
ONE = LayerSpec(HEADS, KV_HEADS, DIM, scale=0.3, weights=0)
OTHER = LayerSpec(HEADS, KV_HEADS, DIM, softcap=3.0, weights=1)
LOCAL = LayerSpec(HEADS, KV_HEADS, DIM, window=6, weights=2)
MODEL = TinyModel(Geometry((ONE, LOCAL, OTHER, ONE), 4096))
GLOBAL = (0, 2, 3)
PARAMS = MODEL.init()
STORED = made_up_statistics(HEADS, KV_HEADS, DIM, 4)
RNG = np.random.default_rng(0)
ROWS = [RNG.permutation(64)[:n].tolist() for n in (47, 30, 12)]
# The first tokens of each row, and one more.
PROTECTED = (0, 1, 2, 7)
CHOICES = ("layer_head", "head", "model")


def kept_by_the_rule(scores, free, count, choice, group=np.max, recent=()):
  """Slots of each KV head of each layer that are kept of the free ones.

  Args:
    scores: scores of a row for every layer and query head, [L, K, G, T].
    free: the slots of each KV head of each layer that compete, in order.
    count: how many of them stay.
    choice: what chooses for itself.
    group: how scores are reduced over a group.
    recent: those of the free ones that stay, as they are new.
  """
  layers, kv_heads, size, _ = scores.shape
  standard = {}
  for layer in range(layers):
    for head in range(kv_heads):
      for query in range(size):
        own = scores[layer, head, query, free[layer][head]].astype(np.float64)
        mean = own.sum() / len(own)
        deviation = np.sqrt(((own - mean) ** 2).sum() / len(own))
        standard[layer, head, query] = (own - mean) / max(deviation, 1e-6)

  def best(mixed, number, among):
    order = sorted(among, key=lambda place: (-mixed[place], place))
    return sorted(order[:number])

  def of_head(layer, head):
    return group([standard[layer, head, g] for g in range(size)], axis=0)

  kept = [[None] * kv_heads for _ in range(layers)]
  for layer in range(layers):
    for head in range(kv_heads):
      slots = free[layer][head]
      places = range(len(slots))
      last = [n for n in places if slots[n] in recent]
      rest, number = set(places) - {*last}, count - len(last)
      if choice == "layer_head":
        chosen = best(of_head(layer, head), number, rest)
      elif choice == "head":
        mixed = sum(of_head(n, head) for n in range(layers)) / layers
        chosen = best(mixed, number, rest)
      else:
        union = set()
        for own in standard.values():
          union |= {*best(own, number, rest)}
        most = np.max([*standard.values()], axis=0)
        chosen = best(most, number, union)
        others = rest - {*chosen}
        chosen += best(most, number - len(chosen), others)
      kept[layer][head] = [slots[n] for n in sorted([*chosen, *last])]
  return kept


def joined(method, scores, cache, budget):
  if method.traits.joins_layers:
    slots = select_joined(method, jnp.asarray(scores), cache, budget)
    return np.asarray(slots)[None].repeat(len(scores), 0)
  return np.stack(
    [method.select(jnp.asarray(each), cache, budget) for each in scores]
  )


def cache_of(lengths, slots):
  """Slots of rows of these lengths, of which nobody reads the keys."""
  positions = np.where(
    np.arange(slots) < np.array(lengths)[:, None], np.arange(slots), -1
  )
  shape = (len(lengths), KV_HEADS, slots)
  return LayerCache(
    jnp.zeros((*shape, DIM)),
    jnp.zeros((*shape, DIM)),
    jnp.broadcast_to(jnp.asarray(positions, jnp.int32)[:, None], shape),
    jnp.asarray(slots, jnp.int32),
  )


@pytest.mark.parametrize("group", ["max", "mean"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("recent", [0, 3])
def test_selections_are_those_of_the_rule(choice, group, recent):
  """Of unequal rows, with ties, protected tokens and what always stays."""
  layers, slots, lengths = 3, 24, [24, 17, 9]
  draw = np.random.default_rng(5)
  shape = (layers, len(lengths), KV_HEADS, GROUP, slots)
  scores = draw.standard_normal(shape).astype(np.float32)
  # Every head of every layer has tokens of equal scores.
  scores[..., 5:9] = scores[..., 4:5]
  scores[0] *= 7.0
  cache = cache_of(lengths, slots)
  method = TriAttention(choice=choice, group=group, recent=recent)
  counts = np.array([11, 9, 7])
  masks = np.isin(np.arange(slots), PROTECTED)
  budget = LayerBudget(
    jnp.asarray(counts), 11, protected=jnp.asarray(masks)[None].repeat(3, 0)
  )
  found = joined(method, scores, cache, budget)
  reduce = {"max": np.max, "mean": np.mean}[group]
  for row, length in enumerate(lengths):
    free = [slot for slot in range(length) if slot not in PROTECTED]
    count = counts[row] - len(PROTECTED)
    new = range(length - recent, length)
    expected = kept_by_the_rule(
      scores[:, row], [[free] * KV_HEADS] * layers, count, choice, reduce, new
    )
    for layer in range(layers):
      for head in range(KV_HEADS):
        own = found[layer, row, head]
        kept = sorted([*PROTECTED, *expected[layer][head]])
        assert own[own >= 0].tolist() == kept


def test_with_one_layer_heads_choose_as_if_alone():
  draw = np.random.default_rng(1)
  scores = draw.standard_normal((1, 2, KV_HEADS, GROUP, 30)).astype("float32")
  cache = cache_of([30, 21], 30)
  budget = LayerBudget(jnp.asarray([9, 9]), 9)
  own, shared = (
    joined(TriAttention(choice=choice), scores, cache, budget)
    for choice in CHOICES[:2]
  )
  np.testing.assert_array_equal(own, shared)


def as_complex(x):
  """Pairs of channels as complex numbers, in the layout of the tiny model."""
  x = np.asarray(x, np.float64)
  return x[..., :HALF] + 1j * x[..., HALF:]


def scores_of(layer, row, number):
  """TriAttention's scores of a row of a layer, by the sum over pairs."""
  stored = safetensors.numpy.load_file(STORED)
  center = as_complex(stored["query_mean"][number])
  # Those that are made up differ between the channels of a pair.
  lengths = stored["query_abs"][number].astype(np.float64)
  lengths = (lengths[:, :HALF] + lengths[:, HALF:]) / 2
  positions = np.asarray(layer.positions[row])
  keys = as_complex(layer.keys[row])
  now = positions.max() + 1
  found = np.zeros((KV_HEADS, GROUP, positions.shape[1]))
  for head in range(HEADS):
    kv_head = head // GROUP
    back = keys[kv_head] * np.exp(-1j * positions[kv_head][:, None] * SPEEDS)
    offset = 1
    while offset <= FARTHEST:
      distance = (now - positions[kv_head] + offset)[:, None] * SPEEDS
      wave = np.cos(distance + np.angle(center[head] * back.conj()))
      total = (np.abs(center[head]) * np.abs(back) * wave).sum(axis=-1)
      total += ((lengths[head] - np.abs(center[head])) * np.abs(back)).sum(-1)
      found[kv_head, head % GROUP] += total / (FARTHEST.bit_length())
      offset *= 2
  return found


def expected_positions(cache, row, count, choice, protected=()):
  """What is kept of a row of a cache, by layer and KV head."""
  layers = [cache.layers[number] for number in GLOBAL]
  scores = np.stack(
    [
      scores_of(layer, row, number)
      for layer, number in zip(layers, GLOBAL, strict=True)
    ]
  )
  positions = [np.asarray(layer.positions[row]) for layer in layers]
  free = [
    [
      [n for n, place in enumerate(head) if place not in (-1, *protected)]
      for head in of_layer.tolist()
    ]
    for of_layer in positions
  ]
  kept, stay = free, count - len(protected)
  if len(free[0][0]) > stay:
    kept = kept_by_the_rule(scores, free, stay, choice)
  return [
    [
      sorted([*protected, *own[head][slots].tolist()])
      for head, slots in enumerate(of_layer)
    ]
    for own, of_layer in zip(positions, kept, strict=True)
  ]


def name_of(choice):
  return f"triattention:choice={choice}:farthest={FARTHEST}:statistics={STORED}"


def global_positions(cache, row):
  found = kept_positions(cache, row)
  return [found[number] for number in GLOBAL]


def assert_law(kept, choice):
  """Layers agree where heads choose, and heads as well where the model does."""
  if choice != "layer_head":
    assert all(heads == kept[0] for heads in kept)
  if choice == "model":
    assert all(head == kept[0][0] for heads in kept for head in heads)


@pytest.fixture(scope="module", params=[False, True], ids=["free", "protected"])
def masks(request):
  return request.param


def prompts_of(masks):
  protected = [[n in PROTECTED for n in range(len(row))] for row in ROWS]
  return kvjax.Prompts.of(ROWS, protected=protected if masks else None)


@pytest.mark.parametrize("choice", CHOICES)
def test_whole_prompts_keep_what_the_rule_says(choice, masks):
  prompts = prompts_of(masks)
  plans = [
    kvjax.get_plan("full", 1.0),
    *(kvjax.get_plan(name_of(choice), budget) for budget in (0.5, 100, 13)),
  ]
  (everything, half, large, small), _ = kvjax.sweep(
    MODEL, PARAMS, prompts, plans
  )
  kept = PROTECTED if masks else ()
  for row, tokens in enumerate(ROWS):
    for cache, count in (
      (half, -(-len(tokens) // 2)),
      (small, min(13, len(tokens))),
    ):
      found = global_positions(cache, row)
      assert found == expected_positions(everything, row, count, choice, kept)
      assert_law(found, choice)
    assert kept_positions(large, row) == kept_positions(everything, row)
  # They differ, or nothing would be shown.
  found = global_positions(small, 0)
  assert (found[0] == found[1]) == (choice != "layer_head")
  assert (found[0][0] == found[0][1]) == (choice == "model")


@functools.partial(jax.jit, static_argnames=("model",))
def evict(model, prepared, cache):
  return evict_all(model, prepared, cache)


@functools.partial(jax.jit, static_argnames=("model",))
def append(model, params, cache, tokens, lengths):
  return feed(model, params, cache, tokens, lengths)[1]


@pytest.mark.parametrize("choice", CHOICES)
def test_evictions_while_decoding_are_those_of_the_rule(choice, masks):
  """The second one meets heads that hold other tokens."""
  later = kvjax.get_plan(
    name_of(choice), kvjax.Tokens(16), schedule=kvjax.Schedule(every=8)
  )
  plan = kvjax.get_plan("full", 1.0, decoding=later)
  cache, _ = kvjax.prefill(MODEL, PARAMS, prompts_of(masks), plan)
  cache = kvjax.reserve(cache, 24)
  kept = PROTECTED if masks else ()
  lengths = np.array([len(row) for row in ROWS])
  said = np.random.default_rng(3).permutation(64)[:24].reshape(3, 8)
  for new in ([0, 0, 0], [8, 5, 2], [6, 8, 7]):
    if any(new):
      cache = append(
        MODEL, PARAMS, cache, jnp.asarray(said), jnp.asarray(new, jnp.int32)
      )
    lengths = lengths + new
    prepared = prepare_decoding(MODEL, cache, lengths, 0, kvjax.Decoding(24))
    before, cache = cache, evict(MODEL, prepared, cache)
    for row in range(3):
      found = global_positions(cache, row)
      assert found == expected_positions(before, row, 16, choice, kept)
      assert_law(found, choice)
      # Windows are not evicted from.
      assert kept_positions(cache, row)[1] == kept_positions(before, row)[1]
  # Keys and values are those of the tokens.
  for number in GLOBAL:
    one, other = before.layers[number], cache.layers[number]
    for head in range(KV_HEADS):
      places = np.asarray(other.positions[0, head, :16])
      old = np.asarray(one.positions[0, head]).tolist()
      index = [old.index(place) for place in places]
      for name in ("keys", "values"):
        np.testing.assert_array_equal(
          getattr(other, name)[0, head, :16], getattr(one, name)[0, head, index]
        )


@pytest.mark.parametrize("choice", CHOICES[1:])
def test_a_cache_that_is_not_due_stays_as_it_is(choice):
  later = kvjax.get_plan(
    name_of(choice), kvjax.Tokens(60), schedule=kvjax.Schedule(every=8)
  )
  plan = kvjax.get_plan("full", 1.0, decoding=later)
  cache, _ = kvjax.prefill(MODEL, PARAMS, prompts_of(False), plan)
  lengths = np.array([len(row) for row in ROWS])
  prepared = prepare_decoding(MODEL, cache, lengths, 0, kvjax.Decoding(24))
  after = evict(MODEL, prepared, cache)
  jax.tree.map(np.testing.assert_array_equal, after, cache)


@pytest.mark.parametrize("choice", CHOICES[1:])
def test_blocks_and_answers_keep_the_law(choice):
  schedule = kvjax.Schedule(block=8, every=4)
  plan = kvjax.get_plan(name_of(choice), kvjax.Tokens(12), schedule=schedule)
  cache, logits = kvjax.prefill(MODEL, PARAMS, prompts_of(False), plan)
  prompt = [kept_positions(cache, row) for row in range(3)]
  cache = kvjax.reserve(cache, 12)
  decoding = kvjax.Decoding(10)
  after = kvjax.generate(MODEL, PARAMS, cache, logits, decoding, keep=True)
  for row, tokens in enumerate(ROWS):
    before = [prompt[row][number] for number in GLOBAL]
    found = global_positions(after.cache, row)
    assert_law(before, choice)
    assert_law(found, choice)
    assert len(found[0][0]) == min(12, len(tokens) + 10)
    assert found != before
    # A row does not depend on its batch mates.
    alone, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of([tokens]), plan)
    assert kept_positions(alone, 0) == prompt[row]
