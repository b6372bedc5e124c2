"""Rows that keep what their likelihood says they need."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.allocation import Adaptive
from kvjax.cache.sharding import parse_mesh
from kvjax.engine import building, compress, likelihood, prompt_programs
from kvjax.errors import InputError
from kvjax.methods import FullKV, KeyDiff
from kvjax.prompts import bucket
from kvjax.registry.registry import METHODS, recipe_of
from kvjax.testing import TinyModel, kept_positions

MODEL = TinyModel()
PARAMS = MODEL.init()
RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (50, 41)]
PROMPTS = kvjax.Prompts.of(ROWS)
NLL = np.asarray(kvjax.negative_log_likelihood(MODEL, PARAMS, PROMPTS))
# One row's curve is bent by -16, the other's is nearly straight.
ALPHA = 16 / float(NLL.max() - NLL.min())
BETA = -ALPHA * float(NLL.max()) - 0.1
TAU = 0.9
# Every way to choose by what was found, in sizes that bite.
NAMES = [
  "full",
  "streaming:rerotate=true",
  "key_norm:skip_layers=0",
  "keydiff",
  "pyramid/ada/keydiff",
  "chunkkv:window=5:chunk=4:layer_reuse=2",
  "lagkv:sinks=2:lag=6",
  "compactor.vllm:sketch=none:first=2:last=3:chunk=16:leverage_chunk=20",
  "protokv.chunk:window=5:prototypes=20",
  "critical/snapkv:window=5",
  "finch:window=5",
  "duoattention",
  "triattention",
]
# One that keeps as many of every head, and one that does not.
PAIR = [NAMES.index(name) for name in ("keydiff", "pyramid/ada/keydiff")]
PLAIN = kvjax.Plan(FullKV(), kvjax.Retention(1.0))


def automatic(name, per_query_head=False, tau=TAU, alpha=ALPHA, beta=BETA):
  plan = kvjax.get_plan(
    name, kvjax.Retention(1.0), per_query_head=per_query_head
  )
  record = kvjax.Calibration(
    alpha, beta, "tiny", plan.label, per_query_head, (0.1, 1.0), 0.0, 1
  )
  return dataclasses.replace(plan, budget=kvjax.Calibrated(record, tau))


def fixed(plan, share):
  return dataclasses.replace(plan, budget=kvjax.Retention(float(share)))


def curve_inverse(tau, kc):
  return np.log1p(tau * np.expm1(kc)) / kc


def valid(layer, row):
  """Positions, keys and values of a row's tokens in all heads, sorted."""
  tokens = []

  def collect(part):
    filled = part.positions[row] >= 0
    positions = part.positions[row][filled].astype(np.float32)[:, None]
    arrays = positions, part.keys[row][filled], part.values[row][filled]
    tokens.append(np.concatenate(arrays, axis=-1))
    return part

  layer.map_slots(collect)
  found = np.concatenate(tokens)
  return found[np.lexsort(found.T[::-1])]


SHARES = curve_inverse(TAU, ALPHA * NLL.astype(float) + BETA)
PLANS = [*map(automatic, NAMES), automatic("keydiff", per_query_head=True)]


@pytest.fixture(scope="module")
def swept():
  """All plans, and a fixed one for each: of either row's retention in turn."""
  asked = [fixed(plan, SHARES[i % 2]) for i, plan in enumerate(PLANS)]
  return kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, [*PLANS, *asked])


def test_every_way_to_choose_is_here():
  entries = [entry.make() for entry in METHODS.values()]
  recipes = [recipe_of(made) for made in entries]
  ways = {type(plan.method).select for plan in PLANS}
  assert ways == {type(recipe.method).select for recipe in recipes}
  # What the pyramid spreads is adaptive.
  spreads = {type(plan.spread).select for plan in PLANS} | {Adaptive.select}
  assert spreads == {
    type(recipe.allocation or recipe.method.allocation).select
    for recipe in recipes
  }


@pytest.mark.slow
def test_a_row_keeps_what_its_retention_asks_for(swept):
  """Exactly what a fixed plan of its retention keeps."""
  assert sorted(SHARES) == pytest.approx([0.143, 0.897], abs=0.01)
  np.testing.assert_allclose(swept.nll, NLL, rtol=1e-6)
  count = len(PLANS)
  for told in swept.retentions[:count]:
    np.testing.assert_allclose(told, SHARES, rtol=1e-4)
  assert swept.retentions[count:] == (None,) * count
  for index, plan in enumerate(PLANS):
    row = index % 2
    ours, theirs = swept.caches[index], swept.caches[count + index]
    assert kept_positions(ours, row) == kept_positions(theirs, row), plan
    assert ours.next_positions[row] == theirs.next_positions[row]
    layers = jax.device_get((ours.layers, theirs.layers))
    for one, other in zip(*layers, strict=True):
      np.testing.assert_array_equal(valid(one, row), valid(other, row))


@pytest.mark.slow
def test_a_row_stands_alone(swept):
  _, plain = kvjax.prefill(MODEL, PARAMS, PROMPTS, PLAIN)
  np.testing.assert_allclose(swept.logits, plain, rtol=0, atol=1e-5)
  # The shorter one, without its padding and without its mate.
  plans = [PLANS[index] for index in PAIR]
  alone, _ = kvjax.sweep(MODEL, PARAMS, kvjax.Prompts.of(ROWS[1:]), plans)
  for index, theirs in zip(PAIR, alone, strict=True):
    assert kept_positions(swept.caches[index], 1) == kept_positions(theirs, 0)


PROGRAMS = [
  prompt_programs.forward_layer,
  prompt_programs.head,
  compress.evaluate_layer,
  compress.select_layer,
  compress.keep_layer,
]


def test_other_documents_run_the_same_programs(monkeypatch):
  """And so do other calibrations and other qualities, in one pass each."""
  monkeypatch.setattr(likelihood, "_nll", None)

  def run(prompts, **options):
    plan = automatic("keydiff", **options)
    found = kvjax.measured_sweep(MODEL, PARAMS, prompts, [plan])
    assert found.caches[0].layers[0].capacity == 48
    return found.retentions[0].tolist()

  first = run(PROMPTS)
  programs = [program._cache_size() for program in PROGRAMS]
  others = kvjax.Prompts.of([row[1:] + row[:1] for row in ROWS])
  assert all(programs)
  for shares in (
    run(others),
    run(PROMPTS, tau=0.85),
    run(PROMPTS, alpha=0.0, beta=-0.5),
  ):
    assert shares != first
  assert programs == [program._cache_size() for program in PROGRAMS]


def test_what_is_allocated_is_the_bucket_of_the_roomiest_row(monkeypatch):
  full, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, PLAIN)
  whole = full.layers[0].keys.shape
  del full

  def dense():
    return sum(array.shape == whole for array in jax.live_arrays())

  def watched(*args, **kwargs):
    alive.append(dense() - before)
    return keep(*args, **kwargs)

  before, alive, keep = dense(), [], building.keep_layer
  monkeypatch.setattr(building, "keep_layer", watched)
  plan = automatic("keydiff", alpha=0.0, beta=-2.0)  # retentions of 0.75
  found = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, [plan])
  (cache,) = found.caches
  assert cache.lengths[0, :, 0].tolist() == [38, 31]
  slots = bucket(38)
  assert slots < 64
  spec = MODEL.geometry.layers[0]
  per_slot = 2 * spec.key_dim * 4 + 4
  layer = 2 * spec.kv_heads * slots * per_slot + 4
  assert cache.nbytes == MODEL.geometry.num_layers * layer + 2 * 4
  assert cache.nbytes == sum(x.nbytes for x in jax.tree.leaves(cache))
  # Keys and values of two layers, then of the second, then of none.
  assert [*alive, dense() - before] == [4, 2, 0]


def test_where_nothing_can_go_all_of_it_stays():
  """tau is 1, a row has one token, or likelihoods are not numbers."""
  prompts = kvjax.Prompts.of([ROWS[0], [7]])
  plans = [
    automatic("keydiff", alpha=0.0, beta=-9.0),
    automatic("keydiff", tau=1.0),
    automatic("adakv", tau=1.0),
  ]
  found = kvjax.measured_sweep(MODEL, PARAMS, prompts, plans)
  some, *whole = found.caches
  assert np.isnan(found.nll[1])
  assert found.retentions[0][1] == 1
  assert kept_positions(some, 1) == [[[0], [0]]] * 2
  assert int(some.lengths[0, 0, 0]) < 50
  full, _ = kvjax.prefill(MODEL, PARAMS, prompts, PLAIN)
  for cache in whole:
    jax.tree.map(np.testing.assert_array_equal, cache, full)

  broken = jax.tree.map(lambda x: x.at[7].set(jnp.nan), PARAMS["embedding"])
  broken = PARAMS | {"embedding": broken}
  assert 7 in ROWS[0]
  (cache,), _ = kvjax.sweep(MODEL, broken, prompts, plans[:1])
  assert cache.lengths[:, 0].tolist() == [[50, 50]] * 2


def test_fixed_and_calibrated_plans_share_a_pass():
  plans = [
    kvjax.get_plan("flat", kvjax.Tokens(5)),
    automatic("keydiff", tau=0.5),
    kvjax.Plan(KeyDiff(), kvjax.Tokens(9)),
    automatic("keydiff"),
    automatic("keydiff", tau=0.99, alpha=0.0, beta=-5.0),
    kvjax.Plan(KeyDiff(), kvjax.Tokens(9), schedule=kvjax.Schedule(every=2)),
  ]
  found = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, plans)
  told = [shares is not None for shares in found.retentions]
  assert told == [False, True, False, True, True, False]
  for calibrated in (True, False):
    own = [index for index, other in enumerate(told) if other == calibrated]
    alone, _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, [plans[i] for i in own])
    for index, cache in zip(own, alone, strict=True):
      jax.tree.map(np.testing.assert_array_equal, cache, found.caches[index])


def test_protected_tokens_stay_or_are_too_many():
  masks = [[index in (3, 4) for index in range(len(row))] for row in ROWS]
  prompts = kvjax.Prompts.of(ROWS, protected=masks)
  plan = automatic("keydiff", alpha=0.0, beta=-20.0)
  cache, _ = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  for row in range(2):
    for layer in kept_positions(cache, row):
      for places in layer:
        assert {3, 4} <= set(places)
        assert len(places) < 10
  prompts = kvjax.Prompts.of(ROWS, protected=[[True] * 50, [False] * 41])
  with pytest.raises(InputError, match="50 tokens of a prompt are protected"):
    kvjax.prefill(MODEL, PARAMS, prompts, plan)


@pytest.mark.slow
def test_four_devices_equal_one(swept):
  plans = [PLANS[index] for index in PAIR]
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    caches, _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, plans)
  stack = caches[0].stacks[0]
  assert stack.keys.addressable_shards[0].data.shape[:3] == (2, 1, 1)
  for ours, index in zip(caches, PAIR, strict=True):
    for row in range(2):
      theirs = kept_positions(swept.caches[index], row)
      assert kept_positions(ours, row) == theirs
