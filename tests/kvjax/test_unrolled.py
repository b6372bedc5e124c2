"""Decoding without a loop over layers is the same decoding."""

import contextlib

import jax
import numpy as np
import pytest

import kvjax
from kvjax.engine import generate, unrolled
from kvjax.model import LayerSpec
from kvjax.testing import TinyModel

LOCAL = LayerSpec(4, 2, 8, window=6, weights=0)
GLOBAL = LayerSpec(6, 3, 4, value_dim=10, weights=1)
# It does not attend.
DENSE = LayerSpec(1, 1, 1, cache=False, weights=2)
HYBRID = TinyModel(
  geometry=kvjax.Geometry((LOCAL, GLOBAL, DENSE, LOCAL, GLOBAL), 4096)
)
UNIFORM = TinyModel(geometry=kvjax.Geometry.uniform(3, 4, 2, 8, 4096))
DRAW = np.random.default_rng(0)
PROMPTS = kvjax.Prompts.of(
  [DRAW.integers(0, 64, n).tolist() for n in (140, 83)]
)
QUESTIONS = kvjax.Prompts.of([DRAW.integers(0, 64, n).tolist() for n in (5, 2)])
DECODING = kvjax.Decoding(max_new_tokens=20, stop_ids=[3])
HALF = kvjax.Retention(0.5)
PLANS = {
  "keydiff": kvjax.get_plan("keydiff", HALF),
  "packed": kvjax.get_plan("adakv:window=4", HALF),
  "quantized": kvjax.get_plan("keydiff", HALF, kv_dtype="int8"),
  "pooled": kvjax.get_plan("kvzip:chunk=64", HALF),
  "evicting": kvjax.get_plan(
    "snapkv:window=4", kvjax.Tokens(16), schedule=kvjax.Schedule(every=4)
  ),
  "renumbering": kvjax.get_plan(
    "streaming:rerotate=true",
    kvjax.Tokens(16),
    schedule=kvjax.Schedule(every=4),
  ),
  "retrieving": kvjax.get_plan("ctkvr:sinks=2:local=5", kvjax.Tokens(8)),
  "on the host": kvjax.get_plan(
    "ctkvr:sinks=2:local=5:offload=true", kvjax.Tokens(8)
  ),
}


@pytest.fixture
def turn(monkeypatch):
  """Generates with and without a loop, from logits or for questions."""

  def run(model, plan, asked, keep, apart):
    monkeypatch.setattr(unrolled, "TOKENS", 1 if apart else 1000)
    params = jax.tree.map(jax.device_put, model.init())
    cache, logits = kvjax.prefill(model, params, PROMPTS, plan)
    cache = kvjax.reserve(cache, 60)
    prompts = QUESTIONS if asked else logits
    return kvjax.generate(
      model, params, cache, prompts, DECODING, keep=keep
    ), cache

  return run


def assert_same(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for one, other in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize(
  "name",
  [
    "keydiff",
    *(pytest.param(n, marks=pytest.mark.slow) for n in PLANS if n != "keydiff"),
  ],
)
def test_tokens_and_cache_are_those_of_the_loop(turn, name):
  hybrid = name in ("keydiff", "packed", "quantized", "evicting")
  model = HYBRID if hybrid else UNIFORM
  expected, _ = turn(model, PLANS[name], asked=True, keep=True, apart=False)
  found, _ = turn(model, PLANS[name], asked=True, keep=True, apart=True)
  assert len(found.cache.stacks) == len(expected.cache.stacks)
  assert_same(found, expected)
  assert int(expected.lengths.max()) > 4


@pytest.mark.parametrize(
  "asked", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_a_cache_that_is_not_kept_is_left_as_it_was(turn, asked):
  plan = PLANS["keydiff"]
  expected, _ = turn(UNIFORM, plan, asked, keep=False, apart=False)
  found, cache = turn(UNIFORM, plan, asked, keep=False, apart=True)
  assert_same(found, expected)
  again, _ = turn(UNIFORM, plan, asked, keep=False, apart=True)
  assert_same(again, found)
  assert found.cache is None
  before, _ = kvjax.prefill(UNIFORM, UNIFORM.init(), PROMPTS, plan)
  assert_same(cache, kvjax.reserve(before, 60))


def test_traced_weights_take_the_loop(turn):
  """It is not known where they are."""
  expected, cache = turn(UNIFORM, PLANS["keydiff"], True, False, apart=True)

  def answer(params):
    return kvjax.generate(UNIFORM, params, cache, QUESTIONS, DECODING).tokens

  found = jax.jit(answer)(UNIFORM.init())
  np.testing.assert_array_equal(found, expected.tokens)


def test_weights_are_not_copied(monkeypatch):
  monkeypatch.setattr(unrolled, "TOKENS", 1)
  model = TinyModel(geometry=kvjax.Geometry.uniform(3, 4, 2, 16, 64), width=64)
  params = jax.tree.map(jax.device_put, model.init())
  (stack,) = model.layer_weights(params)
  layers = unrolled.layers_apart(model, params, 1)
  aligned = 0
  for layer, weights in enumerate(layers):
    pairs = zip(jax.tree.leaves(weights), jax.tree.leaves(stack), strict=True)
    for one, whole in pairs:
      np.testing.assert_array_equal(one[0], whole[layer])
      start = whole.unsafe_buffer_pointer() + layer * whole.nbytes // 3
      if not start % 64:
        aligned += 1
        assert one.unsafe_buffer_pointer() == start
  assert aligned > 10


def test_later_turns_compile_nothing(monkeypatch):
  monkeypatch.setattr(unrolled, "TOKENS", 1)
  params = jax.tree.map(jax.device_put, UNIFORM.init())
  cache, _ = kvjax.prefill(UNIFORM, params, PROMPTS, PLANS["keydiff"])
  cache = kvjax.reserve(cache, 200)
  sizes = []
  for _ in range(3):
    turn = kvjax.generate(
      UNIFORM, params, cache, QUESTIONS, DECODING, keep=True
    )
    cache = turn.cache
    sizes.append(generate._generate_and_keep._cache_size())
  assert sizes[0] == sizes[2]


def test_tokens_stream(monkeypatch):
  plan, streamed = PLANS["keydiff"], []
  for tokens in (1, 1000):
    monkeypatch.setattr(unrolled, "TOKENS", tokens)
    params = jax.tree.map(jax.device_put, UNIFORM.init())
    cache, _ = kvjax.prefill(UNIFORM, params, PROMPTS, plan)
    stream = kvjax.stream(UNIFORM, params, cache, QUESTIONS, DECODING)
    streamed.append([list(step) for step in stream])
  assert streamed[0] == streamed[1]
  assert len(streamed[0]) > 2


def test_weights_elsewhere_are_decoded_in_a_loop():
  on_host = jax.tree.map(np.asarray, UNIFORM.init())
  assert unrolled.layers_apart(UNIFORM, on_host, 1000) is None
  sharding = jax.NamedSharding(
    jax.make_mesh((2,), ("data",)), jax.sharding.PartitionSpec()
  )
  sharded = jax.device_put(on_host, sharding)
  assert unrolled.layers_apart(UNIFORM, sharded, 1000) is None


@pytest.mark.parametrize(
  ("tokens", "on_mesh", "pays"),
  [(256, False, True), (255, False, False), (256, True, False)],
)
def test_long_answers_on_one_cpu_are_decoded_so(tokens, on_mesh, pays):
  params = jax.tree.map(jax.device_put, UNIFORM.init())
  mesh = jax.make_mesh((1,), ("data",)) if on_mesh else None
  with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
    found = unrolled.layers_apart(UNIFORM, params, tokens)
  assert (found is not None) == pays
