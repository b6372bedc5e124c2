"""StreamingLLM with keys turned to their places in the cache."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.engine.compression_plan import Plan
from kvjax.engine.feed import feed
from kvjax.errors import InputError
from kvjax.registry.names import get_method
from kvjax.testing import TinyModel, kept_positions

# Half the time to compile, where one layer shows it all.
MODEL = TinyModel(kvjax.Geometry.uniform(1, 4, 2, 8, 4096))
PARAMS = MODEL.init()
# Each layer's weights by themselves, in float64.
LAYERS = [
  {name: np.asarray(x[number], np.float64) for name, x in stack.items()}
  for stack in PARAMS["layers"]
  for number in range(len(stack["key"]))
]
RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (61, 40, 17)]
PROMPTS = kvjax.Prompts.of(ROWS)
ASKED = [[5, 3], [8], [9, 7, 9]]
QUESTIONS = kvjax.Prompts.of(ASKED, 8)

BUDGET = kvjax.Tokens(12)


def completed(model, cache, logits, decoding):
  """What follows the prompt."""
  return kvjax.generate(model, PARAMS, cache, logits, decoding).rows()


def turned(x, places):
  """RoPE in float64: x is [T, H, 8], a place for each of its T tokens."""
  angles = places[:, None, None] * 100.0 ** (-np.arange(4) / 4)
  low, high = x[..., :4], x[..., 4:]
  cos, sin = np.cos(angles), np.sin(angles)
  return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def test_rerotated_keys_are_those_of_their_places_in_the_cache():
  method = get_method("streaming:rerotate=true")
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, Plan(method, BUDGET))
  np.testing.assert_array_equal(cache.next_positions, [12] * 3)
  kept = [row[:4] + row[-8:] for row in ROWS]
  for row, ids in enumerate(kept):
    x = np.asarray(PARAMS["embedding"], np.float64)[ids]
    keys = (x @ LAYERS[0]["key"]).reshape(12, 2, 8)
    np.testing.assert_allclose(
      cache.layers[0].keys[row],
      turned(keys, np.arange(12)).swapaxes(0, 1),
      atol=1e-5,
    )
  assert kept_positions(cache, 0) == [[list(range(12))] * 2]
  cache = kvjax.reserve(cache, 40)
  cache = kvjax.generate(
    MODEL, PARAMS, cache, QUESTIONS, kvjax.Decoding(5), keep=True
  ).cache
  assert kept_positions(cache, 1)[0][0] == list(range(12 + 1 + 5))


class Stream:
  """One row of StreamingLLM by hand, in float64, with keys before RoPE.

  Every query sees the tokens held as if they stood side by side, as in the
  paper's own loop, which rotates the cache anew at every step.
  """

  def __init__(self, budget, sinks=4):
    self.budget, self.sinks = budget, sinks
    self.valid = [[] for _ in LAYERS]

  def step(self, ids):
    """Feeds tokens, then evicts; answers the logits after the last."""
    embedding = np.asarray(PARAMS["embedding"], np.float64)
    x = embedding[ids]
    for layer, weights in enumerate(LAYERS):
      q, k, v = (
        (x @ weights[name]).reshape(len(ids), -1, 8)
        for name in ("query", "key", "value")
      )
      valid = self.valid[layer]
      before = len(valid)
      valid += list(zip(k, v, strict=True))
      mixed = []
      for number in range(len(ids)):
        seen = valid[: before + number + 1]
        keys = turned(np.array([k for k, _ in seen]), np.arange(len(seen)))
        query = turned(q[number][None], np.array([len(seen) - 1]))[0]
        out = []
        for head in range(4):
          logits = keys[:, head // 2] @ query[head] / np.sqrt(8)
          weight = np.exp(logits - logits.max())
          values = np.array([v[head // 2] for _, v in seen])
          out.append(weight / weight.sum() @ values)
        mixed.append(np.concatenate(out))
      x = x + np.array(mixed) @ weights["output"]
      if len(valid) > self.budget:
        del valid[self.sinks : len(valid) - (self.budget - self.sinks)]
    return x[-1] @ embedding.T


@pytest.mark.parametrize("block", [None, 7])
def test_a_stream_is_rotated_anew_at_every_step(block):
  """Prompt and answer against the loop, with and without going on."""
  method = get_method("streaming:rerotate=true")
  decoding = kvjax.Decoding(20)
  for every in (None, 1):
    schedule = kvjax.Schedule(block=block, every=every)
    plan = Plan(method, BUDGET, schedule=schedule)
    cache, logits = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
    said = completed(MODEL, cache, logits, decoding)
    for row, ids in enumerate(ROWS):
      stream = Stream(12)
      for start in range(0, len(ids), block or len(ids)):
        last = stream.step(ids[start : start + (block or len(ids))])
      np.testing.assert_allclose(logits[row], last, atol=1e-4)
      if every is None:
        stream.budget = 100
      for token in said[row]:
        assert token == np.argmax(last)
        last = stream.step([token])


def test_a_stream_that_keeps_all_that_follows_is_rotated_too():
  """What follows finds the kept tokens as close as without such a plan."""
  method = get_method("streaming:rerotate=true")
  later = Plan(method, 1.0, schedule=kvjax.Schedule(every=1))
  tokens, lengths = jnp.asarray(QUESTIONS.tokens), QUESTIONS.known_lengths
  read = []
  for decoding in (None, later):
    plan = Plan(method, BUDGET, decoding=decoding)
    cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
    cache = kvjax.reserve(cache, tokens.shape[1])
    read.append(feed(MODEL, PARAMS, cache, tokens, jnp.asarray(lengths))[0])
  np.testing.assert_allclose(*read, atol=1e-4)


@pytest.mark.slow
def test_what_is_renumbered_can_be_protected():
  method = get_method("streaming:rerotate=true")
  mask = [[place in (9, 10) for place in range(len(ids))] for ids in ROWS]
  prompts = kvjax.Prompts.of(ROWS, protected=mask)
  plan = Plan(method, BUDGET, schedule=kvjax.Schedule(block=8, every=1))
  cache, _ = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  cache = kvjax.reserve(cache, 40)
  cache = kvjax.generate(
    MODEL,
    PARAMS,
    cache,
    kvjax.Prompts.of([[5]] * 3),
    kvjax.Decoding(20),
    keep=True,
  ).cache
  for row, ids in enumerate(ROWS):
    newest = len(ids) + 21
    kept = [0, 1, 2, 3, 9, 10, *range(newest - 6, newest)]
    assert kept_positions(cache, row) == [[kept] * 2]


def test_renumbered_tokens_must_be_as_many_everywhere():
  for name in ("pyramid/", "ada/"):
    with pytest.raises(
      InputError, match="cannot be spread unevenly over layers or heads: with"
    ):
      kvjax.get_plan(f"{name}streaming:rerotate=true", BUDGET)


def test_rerotation_needs_a_model_that_can():
  class Plain:
    geometry = MODEL.geometry
    embed = MODEL.embed
    layer_weights = MODEL.layer_weights
    block = MODEL.block
    normalize = MODEL.normalize
    logits = MODEL.logits

  method = get_method("streaming:rerotate=true")
  with pytest.raises(InputError, match="Plain has no `rerotate`"):
    kvjax.prefill(Plain(), PARAMS, PROMPTS, Plan(method, BUDGET))


@pytest.mark.parametrize("schedule", [(None, 1), (8, 1)])
def test_a_stream_has_no_end(schedule):
  """Beyond the model's context, where nothing stands so far apart."""
  geometry = dataclasses.replace(MODEL.geometry, max_positions=64)
  model = dataclasses.replace(MODEL, geometry=geometry)
  block, every = schedule
  method = get_method("streaming:rerotate=true")
  length = 200 if block else 60
  prompts = kvjax.Prompts.of([(list(range(60)) * 4)[:length]])
  plan = Plan(method, BUDGET, schedule=kvjax.Schedule(block=block, every=every))
  cache, logits = kvjax.prefill(model, PARAMS, prompts, plan)
  decoding = kvjax.Decoding(40)
  said = completed(model, cache, logits, decoding)
  cache, logits = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  assert said == completed(MODEL, cache, logits, decoding)
  plain = dataclasses.replace(plan, method=get_method("streaming"))

  def go_on():
    cache, logits = kvjax.prefill(model, PARAMS, prompts, plain)
    completed(model, cache, logits, decoding)

  with pytest.raises(InputError, match="this model's context is 64"):
    go_on()


def test_a_model_that_refuses_to_turn_keys_is_refused_at_once():
  class Dynamic(type(MODEL)):
    def rerotate(self, keys, by, spec):
      raise InputError("It depends on the length.")

  method = get_method("streaming:rerotate=true")
  plan = Plan(method, BUDGET, schedule=kvjax.Schedule(every=1))
  with pytest.raises(InputError, match="depends on the length"):
    kvjax.prefill(Dynamic(), PARAMS, PROMPTS, plan)
