"""What every method keeps to in the engine, on one device and on four."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.layers import LayerCache
from kvjax.methods import METHODS, FullKV, get_method
from kvjax.sharding import parse_mesh
from kvjax.testing import TinyModel, held_positions, poisoned

MODEL = TinyModel()
PARAMS = MODEL.init()
RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (50, 26, 33, 41)]
QUESTIONS = kvjax.Prompts.of([[5, 6], [7], [1, 2, 3], [9]])
BUDGET = kvjax.Retention(0.5)
DECODING = kvjax.Decoding(6)
# They look at positions alone.
BLIND = ["full", "random", "streaming"]
# Every method, and presets and wrappers of every kind, in sizes that bite.
NAMES = [
  *BLIND,
  "key_norm",
  "keydiff",
  "h2o.kvpress",
  "tova",
  "tova.keydiff",
  "snapkv:window=5",
  "pyramid/snapkv:window=5",
  "pyramid/keydiff",
  "ada/snapkv:window=5",
  "ada/keydiff",
  "pyramid/ada/snapkv:window=5",
  "ada/protokv:window=5:prototypes=20",
  "ada/chunkkv:window=5:chunk=4",
  "chunkkv:window=5:chunk=4",
  "lagkv:sinks=2:lag=6",
  "lagkv.kvpress:sinks=2:lag=6",
  "compactor:chunk=16",
  "compactor.vllm:first=2:last=3:chunk=16:leverage_chunk=20",
  "pyramid/compactor.vllm:first=2:last=3:chunk=16:leverage_chunk=20",
  "protokv:window=5:prototypes=20",
  "protokv.sat:window=5",
  "protokv.kmeans:window=5:prototypes=9:iterations=2",
]


# Some with a second budget.
TWICE = ["protokv.sat:window=5", "pyramid/ada/snapkv:window=5"]
LESS = kvjax.Tokens(10)


def sweep_all(rows):
  """All methods in one program."""
  plans = {name: kvjax.Plan(get_method(name), BUDGET) for name in NAMES}
  less = {name: kvjax.Plan(get_method(name), LESS) for name in TWICE}
  prompts = kvjax.Prompts.of(rows)
  both = [*less.values(), *plans.values()]
  caches, logits = kvjax.sweep(MODEL, PARAMS, prompts, both)
  of_less, rest = caches[: len(less)], caches[len(less) :]
  return (
    dict(zip(plans, rest, strict=True)),
    logits,
    dict(zip(less, of_less, strict=True)),
  )


def ask(cache):
  return kvjax.answer(MODEL, PARAMS, cache, QUESTIONS, DECODING).rows()


@pytest.fixture(scope="module")
def swept():
  return sweep_all(ROWS)


@pytest.fixture(scope="module")
def swept_on_four():
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    return sweep_all(ROWS)


@pytest.fixture(scope="module")
def swept_backwards():
  """Other tokens in rows of the same lengths."""
  return sweep_all([row[::-1] for row in ROWS])


def test_every_method_is_here():
  kinds = {type(get_method(name)) for name in NAMES}
  assert kinds == set(METHODS.values())


@pytest.mark.parametrize("name", NAMES)
class TestMethodInTheEngine:
  def test_the_choice_follows_from_the_tokens(
    self, name, swept, swept_backwards
  ):
    """Else none of these tests could fail."""
    one, other = swept[0][name], swept_backwards[0][name]
    for row in range(4):
      same = held_positions(one, row) == held_positions(other, row)
      assert same == (name in BLIND)

  def test_empty_slots_may_hold_nan(self, name, swept):
    cache = swept[0][name]
    dirty = poisoned(cache)
    leaves = [x for x in jax.tree.leaves(dirty) if x.ndim > 3 and x.size]
    assert all(bool(jnp.any(jnp.isnan(x))) for x in leaves)
    assert ask(dirty) == ask(cache)

  def test_four_devices_equal_one(self, name, swept, swept_on_four):
    cache, sharded = swept[0][name], swept_on_four[0][name]
    for layer in sharded.layers:
      if isinstance(layer, LayerCache):
        assert len(layer.keys.sharding.device_set) == 4
        assert layer.keys.addressable_shards[0].data.shape[:2] == (2, 1)
      else:  # pages belong to heads as they come
        assert layer.pages.keys.addressable_shards[0].data.shape[0] == 2
    for row in range(4):
      assert held_positions(cache, row) == held_positions(sharded, row)
    np.testing.assert_allclose(swept[1], swept_on_four[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["keydiff", "pyramid/ada/snapkv:window=5"])
def test_answers_on_four_devices_equal_those_on_one(name, swept, swept_on_four):
  expected = ask(swept[0][name])
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    assert ask(swept_on_four[0][name]) == expected


@pytest.mark.parametrize("name", TWICE)
def test_a_sweep_equals_each_plan_alone(name, swept):
  method, prompts = get_method(name), kvjax.Prompts.of(ROWS)
  for budget, together in ((BUDGET, swept[0][name]), (LESS, swept[2][name])):
    plan = kvjax.Plan(method, budget)
    alone, _ = kvjax.prefill(MODEL, PARAMS, prompts, plan)
    jax.tree.map(np.testing.assert_array_equal, alone, together)


def test_a_whole_budget_changes_no_bit():
  budgets = (kvjax.Retention(1.0), kvjax.Tokens(64), kvjax.Tokens(999))
  plans = [
    kvjax.Plan(get_method(name), budget) for name in NAMES for budget in budgets
  ]
  full = kvjax.Plan(FullKV(), kvjax.Retention(1.0))
  prompts = kvjax.Prompts.of(ROWS)
  (dense, *others), _ = kvjax.sweep(MODEL, PARAMS, prompts, [full, *plans])
  assert len(others) == 3 * len(NAMES)
  for cache in others:
    jax.tree.map(np.testing.assert_array_equal, cache, dense)
  assert ask(others[-1]) == ask(dense)
