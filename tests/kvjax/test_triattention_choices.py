"""TriAttention chooses for a head of a layer, of all layers, or the model.

What is kept is compared with loops in float64.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choices_of_layers import (
  CHOICES,
  DIM,
  GLOBAL,
  GROUP,
  HEADS,
  KV_HEADS,
  MODEL,
  PARAMS,
  PROTECTED,
  ROWS,
  assert_law,
  expected_positions,
  global_positions,
  kept_by_the_rule,
  name_of,
  prompts_of,
)
from made_up_statistics import made_up_statistics

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.engine.capacity import prepare_decoding
from kvjax.engine.evicting import evict_all
from kvjax.engine.feed import feed
from kvjax.engine.joined_selection import select_joined
from kvjax.methods import LayerBudget, TriAttention
from kvjax.model import Geometry
from kvjax.testing import TinyModel, kept_positions


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


@pytest.fixture(scope="module", params=[False, True], ids=["free", "protected"])
def masks(request):
  return request.param


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


def test_no_layer_is_copied_to_evict_from_all():
  """Of all layers at a time, only the scores exist."""
  layers, tokens = 16, 256
  model = TinyModel(Geometry.uniform(layers, HEADS, KV_HEADS, DIM, 4096))
  stored = made_up_statistics(HEADS, KV_HEADS, DIM, layers)
  rows = np.random.default_rng(0).integers(0, 64, (2, tokens)).tolist()
  prompts = kvjax.Prompts.of(rows)
  used = {}
  for choice in CHOICES:
    later = kvjax.get_plan(
      f"triattention:choice={choice}:statistics={stored}",
      kvjax.Tokens(128),
      schedule=kvjax.Schedule(every=128),
    )
    plan = kvjax.get_plan("full", 1.0, decoding=later)
    cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
    prepared = prepare_decoding(
      model, cache, np.array([tokens] * 2), 0, kvjax.Decoding(8)
    )
    run = jax.jit(
      evict_all, static_argnames=("model",), donate_argnames=("cache",)
    )
    memory = run.lower(model, prepared, cache).compile().memory_analysis()
    used[choice] = memory.temp_size_in_bytes
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.stacks))
    assert memory.alias_size_in_bytes >= held
  scores = layers * 2 * HEADS * tokens * 4
  for choice in CHOICES[1:]:
    assert used[choice] <= used["layer_head"] + 3 * scores
    assert used[choice] < held / 2


@pytest.mark.parametrize("choice", CHOICES)
def test_every_query_head_may_store_its_own_keys(choice):
  plan = kvjax.get_plan(name_of(choice), kvjax.Tokens(9), per_query_head=True)
  cache, _ = kvjax.prefill(MODEL, PARAMS, prompts_of(False), plan)
  for row in range(3):
    kept = global_positions(cache, row)
    assert {len(heads) for heads in kept} == {HEADS}
    assert_law(kept, choice)


def test_a_cache_in_bfloat16_is_scored_as_its_float32_copy():
  model = dataclasses.replace(MODEL, dtype="bfloat16")
  params = model.init()
  plans = [
    kvjax.get_plan("full", 1.0),
    *(kvjax.get_plan(name_of(choice), 0.5) for choice in CHOICES[1:]),
  ]
  found, _ = kvjax.sweep(model, params, kvjax.Prompts.of(ROWS), plans)
  for choice, cache in zip(CHOICES[1:], found[1:], strict=True):
    for row, tokens in enumerate(ROWS):
      expected = expected_positions(found[0], row, -(-len(tokens) // 2), choice)
      assert global_positions(cache, row) == expected
