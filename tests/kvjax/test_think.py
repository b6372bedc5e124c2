"""ThinK: channels of kept keys are gone, and nothing else changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.cache.narrow import NarrowLayer
from kvjax.cache.sharding import parse_mesh
from kvjax.errors import InputError
from kvjax.methods import Think
from kvjax.methods.think import BestChannels
from kvjax.testing import TinyModel, kept_positions, random_activations

SPEC = kvjax.LayerSpec(heads=4, kv_heads=2, key_dim=8, value_dim=6)
MODEL = TinyModel(kvjax.Geometry((SPEC,) * 2, 512))
LENGTHS = (45, 7, 33, 20)
DECODING = kvjax.Decoding(6)


def rows():
  draw = np.random.default_rng(3)
  return [draw.integers(0, 64, n).tolist() for n in LENGTHS]


ROWS = rows()
PROMPTS = kvjax.Prompts.of(ROWS)
QUESTIONS = kvjax.Prompts.of([[1, 2, 3], [4], [5, 6], [7, 8]])


def plan_of(text="think:share=0.4:window=5/snapkv:window=4", share=0.5):
  return kvjax.get_plan(text, kvjax.Retention(share))


def softmax_attention(queries, keys, values, visible, spec):
  """Attention of one row, in float64."""
  group = spec.heads // spec.kv_heads
  logits = queries @ keys.repeat(group, 0).swapaxes(1, 2)
  logits = np.where(visible.repeat(group, 0), logits, -np.inf)
  logits = logits * spec.key_dim**-0.5
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  return weights @ values.repeat(group, 0)


def test_attention_equals_that_of_zeroed_channels():
  """In float64, with new tokens whose keys are whole."""
  seen = random_activations(0, [11, 6], 12)
  channels = jnp.asarray([[[0, 3, 7], [1, 2, 5]], [[4, 5, 6], [0, 1, 7]]])
  layer = NarrowLayer.of(LayerCache.of(seen), channels.astype(jnp.int32))
  block = random_activations(1, [3, 3], 3)
  starts = jnp.asarray([[11], [6]], jnp.int32)
  block = dataclasses.replace(block, positions=block.positions + starts)
  index = jnp.int32(0)
  stack = jax.tree.map(lambda x: x[None], layer.grow(4))
  output, stack = stack.step(block, index)
  after = stack.at(index)
  again, _ = after.attend(block)
  np.testing.assert_array_equal(output, again)
  spec = kvjax.LayerSpec(heads=4, kv_heads=2, key_dim=8)
  for row, length in enumerate((11, 6)):
    keep = np.zeros((2, 1, 8))
    for head in range(2):
      keep[head, :, np.asarray(channels)[row, head]] = 1
    kept = np.asarray(seen.keys, np.float64)[row, :, :length] * keep
    new = np.asarray(block.keys, np.float64)[row]
    values = [
      np.asarray(x.values, np.float64)[row, :, :n]
      for x, n in ((seen, length), (block, 3))
    ]
    keys = np.concatenate([kept, new], axis=1)
    visible = np.tile(np.tril(np.ones((3, length + 3)), length) > 0, (2, 1, 1))
    expected = softmax_attention(
      np.asarray(block.queries, np.float64)[row],
      keys,
      np.concatenate(values, axis=1),
      visible,
      spec,
    )
    np.testing.assert_allclose(output[row], expected, rtol=1e-5, atol=1e-6)
    assert after.row_positions(row) == [list(range(length + 3))] * 2


@pytest.mark.parametrize("lengths", [(11, 6), (3, 12)])
def test_channels_are_the_best_products_of_mean_squares(lengths):
  seen = random_activations(2, lengths, 12, heads=6, kv_heads=3)
  cache = LayerCache.of(seen)
  found = BestChannels(0.3, 5).choose(cache, seen)
  assert found.shape == (2, 3, 6)
  for row, length in enumerate(lengths):
    queries = np.asarray(seen.queries, np.float64)[row, :, :length][:, -5:]
    keys = np.asarray(seen.keys, np.float64)[row, :, :length]
    by_queries = (queries**2).mean(1).reshape(3, 2, 8).mean(1)
    scores = by_queries * (keys**2).mean(1)
    best = np.argsort(-scores, axis=-1)[:, :6]
    np.testing.assert_array_equal(found[row], np.sort(best, axis=-1))


def test_memory_is_that_of_the_channels_that_stay():
  """Of 8 channels 5 stay: int(0.4 * 8) are dropped."""
  cache, _ = kvjax.prefill(MODEL, MODEL.init(), PROMPTS, plan_of())
  whole, _ = kvjax.prefill(
    MODEL, MODEL.init(), PROMPTS, plan_of("snapkv:window=4")
  )
  heads = 2 * len(ROWS) * 2
  slots = heads * 24  # a half of a bucket of 48
  numbers = slots * (5 + 6 + 1) + heads * 5
  cursors = 2 * 2 + len(ROWS)
  assert cache.nbytes == 4 * (numbers + cursors)
  assert whole.nbytes - cache.nbytes == 4 * (slots * 3 - heads * 5 - 2)
  for row in range(len(ROWS)):
    assert kept_positions(cache, row) == kept_positions(whole, row)


def told(cache, prompts=QUESTIONS):
  """The keys of new tokens in the last layer, which depend on the first."""
  answer = kvjax.generate(
    MODEL, MODEL.init(), kvjax.reserve(cache, 64), prompts, DECODING, keep=True
  )
  layer = answer.cache.layer(1)
  new = layer.tail if isinstance(layer, NarrowLayer) else layer
  keys, positions = np.asarray(new.keys), np.asarray(new.positions)
  before = np.asarray(cache.next_positions)
  return [
    keys[row, :, positions[row, 0] >= n].swapaxes(0, 1)
    for row, n in enumerate(before)
  ]


def assert_told(ours, theirs):
  for own, other in zip(ours, theirs, strict=True):
    assert own.shape[-1] == SPEC.key_dim
    np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def test_a_share_of_zero_changes_nothing():
  whole, narrow = (
    kvjax.prefill(MODEL, MODEL.init(), PROMPTS, plan_of(text))[0]
    for text in ("snapkv:window=4", "think:share=0/snapkv:window=4")
  )
  assert_told(told(narrow), told(whole))


def test_dropped_channels_matter():
  """All else in these tests could pass with whole keys."""
  kept, dropped = kvjax.sweep(
    MODEL,
    MODEL.init(),
    PROMPTS,
    [plan_of(f"think:share={share}/full", 1.0) for share in (0.0, 0.8)],
  )[0]
  for own, other in zip(told(kept), told(dropped), strict=True):
    assert np.abs(own - other).max() > 0.01


def test_a_row_is_as_it_is_alone():
  cache, _ = kvjax.prefill(MODEL, MODEL.init(), PROMPTS, plan_of())
  together = told(cache)
  for row in (0, 1):
    prompts = kvjax.Prompts.of([ROWS[row]])
    alone, _ = kvjax.prefill(MODEL, MODEL.init(), prompts, plan_of())
    assert_told(told(alone, QUESTIONS.row(row)), [together[row]])


def test_a_mesh_changes_nothing():
  cache, _ = kvjax.prefill(MODEL, MODEL.init(), PROMPTS, plan_of())
  expected = told(cache)
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    sharded, _ = kvjax.prefill(MODEL, MODEL.init(), PROMPTS, plan_of())
    kept = sharded.stacks[0].kept.keys
    assert kept.sharding.shard_shape(kept.shape)[1:3] == (2, 1)
    assert_told(told(sharded), expected)


def test_a_saved_cache_is_the_same(tmp_path):
  cache, _ = kvjax.prefill(MODEL, MODEL.init(), PROMPTS, plan_of())
  where = dict(model=MODEL, model_id="tiny")
  kvjax.save_cache(cache, tmp_path / "cache", **where)
  loaded = kvjax.load_cache(tmp_path / "cache", **where)
  jax.tree.map(np.testing.assert_array_equal, cache, loaded)
  assert jax.tree.structure(cache) == jax.tree.structure(loaded)


def test_caches_are_joined_and_divided():
  cache, _ = kvjax.prefill(MODEL, MODEL.init(), PROMPTS, plan_of())
  joined = kvjax.stack(kvjax.unstack(cache, 2))
  jax.tree.map(np.testing.assert_array_equal, cache, joined)


def test_local_layers_keep_their_channels():
  local = dataclasses.replace(SPEC, window=8)
  model = TinyModel(kvjax.Geometry((local, SPEC), 512))
  cache, _ = kvjax.prefill(model, model.init(), PROMPTS, plan_of())
  assert cache.layer(0).keys.shape[-1] == 8
  assert cache.layer(1).kept.keys.shape[-1] == 5
  answer = kvjax.generate(model, model.init(), cache, QUESTIONS, DECODING)
  assert len(answer.rows()) == len(ROWS)


def test_it_combines_with_what_selects_tokens():
  plans = [
    plan_of("pyramid/think/snapkv:window=4"),
    plan_of("think/chunked:length=8/keydiff"),
    dataclasses.replace(plan_of(), per_query_head=True),
  ]
  caches, _ = kvjax.sweep(MODEL, MODEL.init(), PROMPTS, plans)
  for cache in caches:
    assert cache.layer(1).kept.keys.shape[-1] in (4, 5)
    kvjax.generate(MODEL, MODEL.init(), cache, QUESTIONS, DECODING)


@pytest.mark.parametrize(
  ("text", "budget", "options", "sentence"),
  [
    ("think/kvzip", kvjax.Retention(0.5), {}, "a replay of the prompt"),
    ("ada/think/snapkv", kvjax.Retention(0.5), {}, "Heads compete"),
    ("think/rerotate/keydiff", kvjax.Tokens(9), {}, "kept tokens that move"),
    ("rerotate/think/keydiff", kvjax.Tokens(9), {}, "kept tokens that move"),
    ("think/keydiff", kvjax.Tokens(9), {"kv_dtype": "int8"}, "eight bits"),
    ("think/keydiff", kvjax.Threshold(0.5), {}, "cannot have a threshold"),
    ("think:share=1.5/keydiff", kvjax.Tokens(9), {}, "between 0 and 1"),
    ("think:window=0/keydiff", kvjax.Tokens(9), {}, "window must be 1 or more"),
    (
      "think/keydiff",
      kvjax.Tokens(9),
      {"schedule": kvjax.Schedule(every=4)},
      "dropped once, after the whole prompt",
    ),
    (
      "think/keydiff",
      kvjax.Tokens(9),
      {"schedule": kvjax.Schedule(block=4)},
      "dropped once, after the whole prompt",
    ),
    (
      "think/keydiff",
      kvjax.Tokens(9),
      {
        "decoding": kvjax.get_plan(
          "keydiff", kvjax.Tokens(9), schedule=kvjax.Schedule(every=4)
        )
      },
      "evictions while decoding",
    ),
  ],
)
def test_what_does_not_combine_is_one_sentence(text, budget, options, sentence):
  def make():
    dataclasses.replace(kvjax.get_plan(text, budget), **options)

  with pytest.raises(InputError, match=sentence) as caught:
    make()
  assert ". " not in str(caught.value)


def test_nothing_is_retrieved_among_narrow_keys():
  plan = kvjax.get_plan("quest", kvjax.Tokens(9))
  with pytest.raises(InputError, match="retrieval"):
    dataclasses.replace(plan, method=Think(kvjax.get_method("keydiff")))
