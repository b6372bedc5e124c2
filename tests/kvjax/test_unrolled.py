"""Decoding without a loop over layers is the same decoding."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.engine import unrolled
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
PROMPTS = kvjax.Prompts.of([DRAW.integers(0, 64, n).tolist() for n in (40, 23)])
QUESTIONS = kvjax.Prompts.of([DRAW.integers(0, 64, n).tolist() for n in (5, 2)])
DECODING = kvjax.Decoding(max_new_tokens=20, stop_ids=[3])
HALF = kvjax.Retention(0.5)
PLANS = {
  "keydiff": kvjax.get_plan("keydiff", HALF),
  "packed": kvjax.get_plan("adakv:window=4", HALF),
  "quantized": kvjax.get_plan("keydiff", HALF, kv_dtype="int8"),
  "evicting": kvjax.get_plan(
    "snapkv:window=4", kvjax.Tokens(16), kvjax.Schedule(every=4)
  ),
  "renumbering": kvjax.get_plan(
    "streaming:rerotate=true", kvjax.Tokens(16), kvjax.Schedule(every=4)
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
    params = model.init()
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


def test_weights_are_not_copied():
  model = TinyModel(geometry=kvjax.Geometry.uniform(3, 4, 2, 16, 64), width=64)
  params = jax.tree.map(jax.device_put, model.init())
  (stack,) = model.layer_weights(params)
  layers = unrolled.UnrolledModel.of(model).unroll(params).layers
  for layer, weights in enumerate(layers):
    pairs = zip(jax.tree.leaves(weights), jax.tree.leaves(stack), strict=True)
    for one, whole in pairs:
      size = whole.nbytes // 3
      assert one.shape == (1, *whole.shape[1:])
      start = whole.unsafe_buffer_pointer() + layer * size
      if not start % 64:
        assert one.unsafe_buffer_pointer() == start


@pytest.mark.parametrize(
  ("tokens", "on_mesh", "pays"),
  [(512, False, True), (511, False, False), (512, True, False)],
)
def test_long_answers_on_one_cpu_are_decoded_so(tokens, on_mesh, pays):
  if jax.default_backend() != "cpu":
    pays = False
  if not on_mesh:
    assert unrolled.pays_off(tokens) == pays
    return
  with jax.set_mesh(jax.make_mesh((1,), ("data",))):
    assert unrolled.pays_off(tokens) == pays
