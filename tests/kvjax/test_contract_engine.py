"""What every method keeps to in the engine, on one device and on four."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_up_gates import made_up_fast_kvzip, made_up_kvzap
from made_up_statistics import made_up_statistics
from mesh_answers import answered, assert_same

import kvjax
from kvjax.cache.narrow import NarrowLayer
from kvjax.cache.sharding import parse_mesh
from kvjax.methods import FullKV
from kvjax.model import Geometry, LayerSpec
from kvjax.registry.registry import METHODS, recipe_of
from kvjax.testing import TinyModel, kept_positions, poison_cache
from kvjax.testing.engine_contract import check_blocks
from kvjax.testing.subject import Subject

# Half the time to compile, where one layer shows it all.
SHALLOW = TinyModel(Geometry.uniform(1, 4, 2, 8, 4096))
DEEP = TinyModel()
RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (50, 26, 33, 41)]
QUESTIONS = kvjax.Prompts.of([[5, 6], [7], [1, 2, 3], [9]])
BUDGET = kvjax.Retention(0.5)
DECODING = kvjax.Decoding(6)
# Two devices have each of the two KV heads on the last one.
MESHES = ("data:2,model:2", "data:4", "model:4")
# Presets and wrappers of every kind, in sizes that bite.
SIZED = [
  "full",
  "streaming",
  "random",
  "key_norm",
  "keydiff",
  "h2o.kvpress",
  "tova",
  "snapkv:window=5",
  "pyramid/snapkv:window=5",
  "ada/snapkv:window=5",
  "pyramid/ada/snapkv:window=5",
  "chunkkv:window=5:chunk=4",
  "lagkv:sinks=2:lag=6",
  "compactor:chunk=16",
  "compactor.vllm:first=2:last=3:chunk=16:leverage_chunk=20",
  "protokv:window=5:prototypes=20",
  "protokv.sat:window=5",
  "criticalkv:window=5",
  "ada/critical/snapkv:window=5",
  "dropkv:window=5",
  "finch:window=5",
  "duoattention:sinks=3:keep=9",
  "simlayerkv:sinks=3:recent=5",
  "think/snapkv:window=5",
]
# A method that is added later is checked as it is.
NAMES = [
  *SIZED,
  *(
    name
    for name, entry in METHODS.items()
    if type(recipe_of(entry.make()).method)
    not in {type(kvjax.get_plan(sized, BUDGET).method) for sized in SIZED}
  ),
  "qfilters, stored",
  "expected_attention, stored",
  "triattention, stored",
  "triattention.code, stored",
]


# Some with a second budget.
TWICE = ["protokv.sat:window=5", "pyramid/ada/snapkv:window=5"]
LESS = kvjax.Tokens(10)


# With files that are of the model with two layers.
STORED = made_up_statistics(4, 2, 8, 2)
FILES = {
  "kvzap": f"kvzap:gate={made_up_kvzap(32, 2, 2)}",
  "fast_kvzip": f"fast_kvzip:gate={made_up_fast_kvzip(32, 2, 2)}",
  "qfilters, stored": f"qfilters:filters={STORED}",
  "expected_attention, stored": f"expected_attention:statistics={STORED}",
  "triattention, stored": f"triattention:statistics={STORED}",
  "triattention.code, stored": f"triattention.code:statistics={STORED}",
}


def model_of(name):
  """Pyramids have more to say of two layers."""
  return DEEP if name.startswith("pyramid/") or name in FILES else SHALLOW


def sweep(model, rows, plans):
  """All plans in one pass: their caches, and the logits."""
  prompts = kvjax.Prompts.of(rows)
  caches, logits = kvjax.sweep(model, model.init(), prompts, list(plans))
  return dict(zip(plans, caches, strict=True)), logits


class Caches(dict):
  """Caches by name, made when they are first asked for."""

  def __init__(self, rows=ROWS, mesh=None):
    self.rows, self.mesh = rows, mesh

  def __missing__(self, name):
    plan = plan_of(name)
    mesh = (
      jax.set_mesh(parse_mesh(self.mesh))
      if self.mesh
      else contextlib.nullcontext()
    )
    with mesh:
      self[name] = sweep(model_of(name), self.rows, [plan])[0][plan]
    return self[name]


def plan_of(name, budget=BUDGET):
  return kvjax.get_plan(FILES.get(name, name), budget)


def ask(name, cache):
  model = model_of(name)
  return kvjax.generate(model, model.init(), cache, QUESTIONS, DECODING).rows()


@pytest.fixture(scope="module")
def swept():
  return Caches()


@pytest.fixture(scope="module")
def swept_on_four():
  return Caches(mesh="data:2,model:2")


@pytest.fixture(scope="module")
def swept_backwards():
  """Other tokens in rows of the same lengths."""
  return Caches([row[::-1] for row in ROWS])


@functools.cache
def on_one_device(name):
  return answered(model_of(name), plan_of(name), ROWS)


def test_every_allocation_is_here():
  recipes = [recipe_of(entry.make()) for entry in METHODS.values()]
  spreads = {type(plan_of(name).spread) for name in NAMES}
  assert spreads >= {
    type(recipe.allocation or recipe.method.allocation) for recipe in recipes
  }


@pytest.mark.parametrize("name", NAMES)
class TestMethodInTheEngine:
  def test_the_choice_follows_from_the_tokens(
    self, name, swept, swept_backwards
  ):
    """Else none of these tests could fail."""
    one, other = swept[name], swept_backwards[name]
    traits = plan_of(name).method.traits
    if traits.renumbers:
      pytest.skip("its positions are places in the cache")
    for row in range(4):
      same = kept_positions(one, row) == kept_positions(other, row)
      # SimLayerKV chooses among layers, of which there is one here.
      by_layer = name.startswith("simlayerkv")
      assert same == (traits.keeps_all or traits.positional or by_layer)

  def test_empty_slots_may_hold_nan(self, name, swept):
    cache = swept[name]
    dirty = poison_cache(cache)
    leaves = [
      x
      for x in jax.tree.leaves(dirty.stacks)
      if jnp.issubdtype(x.dtype, jnp.floating) and x.size
    ]
    assert leaves
    assert all(bool(jnp.any(jnp.isnan(x))) for x in leaves)
    assert ask(name, dirty) == ask(name, cache)

  def test_four_devices_have_a_share_each(self, name, swept_on_four):
    for stack in swept_on_four[name].stacks:
      if not plan_of(name).spread.ragged:
        slots = stack.kept if isinstance(stack, NarrowLayer) else stack
        assert len(slots.keys.sharding.device_set) == 4
        assert slots.keys.addressable_shards[0].data.shape[1:3] == (2, 1)
      else:
        total = stack.pages.keys.shape[2]
        shard = stack.pages.keys.addressable_shards[0].data.shape
        assert shard[1:3] == (2, total // 2)

  @pytest.mark.parametrize("mesh", MESHES)
  def test_four_devices_keep_and_answer_what_one_does(self, name, mesh):
    spread = answered(model_of(name), plan_of(name), ROWS, mesh)
    assert_same(on_one_device(name), spread)


@pytest.mark.parametrize("model", [SHALLOW, DEEP])
def test_logits_on_four_devices_equal_those_on_one(model):
  one = sweep(model, ROWS, [plan_of("full")])[1]
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    four = sweep(model, ROWS, [plan_of("full")])[1]
  np.testing.assert_allclose(one, four, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TWICE)
def test_a_sweep_equals_each_plan_alone(name):
  model, prompts = model_of(name), kvjax.Prompts.of(ROWS)
  plans = [plan_of(name), plan_of(name, LESS), plan_of("keydiff")]
  swept, _ = sweep(model, ROWS, plans)
  for plan in plans:
    alone, _ = kvjax.prefill(model, model.init(), prompts, plan)
    jax.tree.map(np.testing.assert_array_equal, alone, swept[plan])


@pytest.mark.parametrize("shares", [(1.0, 0.5), (0.5, 1.0)])
def test_a_layer_that_copies_a_selection_has_a_budget_of_its_own(shares):
  """Its tokens are those of the first layer, which may keep everything."""
  prompts, params = kvjax.Prompts.of(ROWS), DEEP.init()
  budget = kvjax.PerLayer([kvjax.Retention(share) for share in shares])
  name = "chunkkv:window=4:chunk=4:layer_reuse=2"
  plan, even = kvjax.get_plan(name, budget), kvjax.get_plan(name, BUDGET)
  alone, _ = kvjax.prefill(DEEP, params, prompts, plan)
  (swept, same), _ = kvjax.sweep(DEEP, params, prompts, [plan, even])
  measured = kvjax.measured_sweep(DEEP, params, prompts, [plan]).caches[0]
  for cache in (swept, measured):
    jax.tree.map(np.testing.assert_array_equal, alone, cache)
  layer = shares.index(0.5)
  for row in range(4):
    half = kept_positions(alone, row)[layer]
    assert half == kept_positions(same, row)[layer]


def test_a_selection_is_copied_past_a_window_while_another_method_observes():
  """Layer 0 of the group has a window: layer 1 has no scores of it to copy."""
  local, other = LayerSpec(4, 2, 8, window=8), LayerSpec(4, 2, 8)
  model = TinyModel(Geometry((local, other, other), 4096))
  prompts, params = kvjax.Prompts.of(ROWS), model.init()
  name = "chunkkv:window=4:chunk=4:layer_reuse=3"
  later = kvjax.get_plan("h2o", BUDGET, schedule=kvjax.Schedule(every=4))
  alone, then = (
    kvjax.get_plan(name, BUDGET, decoding=decoding)
    for decoding in (None, later)
  )
  caches, _ = kvjax.sweep(model, params, prompts, [alone, then])
  for row in range(4):
    one, two = (kept_positions(cache, row) for cache in caches)
    assert one == two
    assert one[1] == one[2]


def test_a_whole_budget_changes_no_bit():
  budgets = (kvjax.Retention(1.0), kvjax.Tokens(64), kvjax.Tokens(999))
  full = kvjax.Plan(FullKV(), kvjax.Retention(1.0))
  # ThinK drops channels of the keys, whatever the budget.
  names = [n for n in NAMES if plan_of(n).method.traits.channels is None]
  plans = [plan_of(name, budget) for name in names for budget in budgets]
  caches, _ = sweep(DEEP, ROWS, [*plans, full])
  assert len(caches) == 3 * len(names)  # the full cache is one of them
  for cache in caches.values():
    jax.tree.map(np.testing.assert_array_equal, cache, caches[full])
  name = "pyramid/snapkv:window=5"
  assert ask(name, caches[plan_of(name, budgets[1])]) == ask(name, caches[full])


@pytest.mark.parametrize("name", ["snapkv:window=16", "streaming:sinks=20"])
def test_methods_that_always_keep_many_tokens_are_checked_in_blocks(name):
  check_blocks(Subject(kvjax.get_method(name)))
