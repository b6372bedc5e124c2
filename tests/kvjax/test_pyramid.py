"""PyramidKV's layer budgets against its formula, and the memory they take."""

import numpy as np
import pytest

import kvjax
from kvjax.allocation import Pyramid, RoundedPyramid, Sizes, Uniform
from kvjax.engine.preparing import prepare
from kvjax.errors import InputError
from kvjax.methods import KeyDiff, SnapKV
from kvjax.prompts import bucket_lengths
from kvjax.registry.names import get_method, get_recipe
from kvjax.registry.registry import Recipe
from kvjax.testing import TinyModel, kept_positions

PYRAMID = Pyramid(Uniform())


def layer_kept(budget, length, layers, allocation=PYRAMID, protects=8):
  """Tokens that each layer keeps of a row."""
  sizes = Sizes((2,) * layers, protects)
  counts = allocation.counts(budget, np.array([length]), sizes)
  return tuple(counts[:, 0].tolist())


@pytest.mark.parametrize("layers", [2, 4, 32])
@pytest.mark.parametrize("budget", [64, 128, 500, 2048])
def test_layers_keep_the_budget_together(budget, layers):
  for length in (budget + 1, 3 * budget, 20 * budget):
    kept = layer_kept(kvjax.Tokens(budget), length, layers)
    assert sum(kept) == layers * budget
    assert list(kept) == sorted(kept, reverse=True)
    assert max(kept) <= length
    assert min(kept) >= 8


def test_the_lines_ends_are_the_papers():
  kept = layer_kept(kvjax.Tokens(128), 10_000, 32)
  base = 128 - 8
  assert abs(kept[0] - (2 * base - base / 20 + 8)) <= 1
  assert abs(kept[-1] - (base / 20 + 8)) <= 1


@pytest.mark.parametrize("pyramid", [Pyramid, RoundedPyramid])
def test_the_window_is_the_methods_with_and_without_a_name(pyramid):
  geometry = kvjax.Geometry.uniform(8, 4, 2, 8, 4096)
  prompts = kvjax.Prompts.of([list(range(64)) * 8])
  budget, method = kvjax.Retention(0.125), SnapKV(window=32)
  name = "pyramid" if pyramid is Pyramid else "pyramid.kvpress"
  counts = [
    prepare(plan, prompts, geometry).counts[:, 0].tolist()
    for plan in (
      kvjax.Plan(method, budget, allocation=pyramid(Uniform(), beta=3)),
      kvjax.get_plan(f"{name}:beta=3/snapkv:window=32", budget),
    )
  ]
  # The highest layer would keep 64 / 3, which is less than the window.
  assert counts == [[64] * 8] * 2
  tokens = kvjax.Plan(method, kvjax.Tokens(64), allocation=PYRAMID)
  kept = prepare(tokens, prompts, geometry).counts[:, 0].tolist()
  # With base = 64 - 32, 2 * 32 - 32 / 20 and 32 / 20, each with its window.
  assert (kept[0], kept[-1]) == (94, 34)
  assert sum(kept) == 8 * 64


def test_a_short_prompt_flattens_the_pyramid():
  kept = layer_kept(kvjax.Tokens(128), 140, 4)
  # max = n - W = 132 and min = 2 * 120 - 132 = 108, each with its window.
  assert kept == (140, 132, 124, 116)


def test_retention_too_leaves_room_for_the_window():
  """max = n - W = 992, as in kvpress; min = 2 * 600 - 992 = 208."""
  kept = layer_kept(kvjax.Retention(0.6), 1000, 4)
  assert kept == (992, 731, 469, 208)


def test_layers_keep_every_budget_together():
  budgets = [kvjax.Tokens(n) for n in (9, 12, 33, 128)]
  budgets += [kvjax.Retention(r) for r in (0.1, 0.3, 0.77, 0.99)]
  for layers in (2, 3, 7, 32):
    for length in range(9, 300, 7):
      for budget in budgets:
        kept = layer_kept(budget, length, layers)
        assert sum(kept) == layers * budget.num_kept(length)
        assert length >= kept[0]
        assert list(kept) == sorted(kept, reverse=True)


def test_the_total_is_the_inner_methods():
  """A share of what stands between the protected ends, and these."""
  budget, pyramid = kvjax.Retention(0.5), get_recipe("pyramid/compactor.vllm")
  kept = layer_kept(budget, 1080, 4, pyramid.allocation, protects=0)
  inner = layer_kept(budget, 1080, 1, pyramid.method.allocation)[0]
  assert sum(kept) == 4 * inner == 4 * 500


def test_a_layer_spreads_its_own_share_over_its_heads():
  name = "compactor.vllm:sketch_dim=6:chunk=16:leverage_chunk=20:first=2:last=3"
  method = get_method(name)
  pyramid = Pyramid(method.allocation, beta=2.0)
  model = TinyModel()
  prompts = kvjax.Prompts.of([list(range(60)), list(range(45))])
  budget = kvjax.Retention(0.5)
  plan = kvjax.Plan(method, budget, allocation=pyramid)
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  valid = np.asarray(cache.lengths).sum(axis=-1)
  for row, length in enumerate((60, 45)):
    kept = layer_kept(budget, length, 2, pyramid, protects=0)
    assert valid[:, row].tolist() == [2 * count for count in kept]
    for layer in kept_positions(cache, row):
      for head in layer:
        assert {0, 1, length - 3, length - 2, length - 1} <= set(head)


@pytest.mark.parametrize(
  "inner", ["lagkv", "full", "key_norm.lagkv", "pyramidkv"]
)
def test_what_has_no_budget_to_spread_is_refused(inner):
  with pytest.raises(InputError, match="cannot be spread unevenly"):
    kvjax.get_plan(f"pyramid/{inner}", kvjax.Tokens(20))


def test_retention_includes_the_window():
  kept = layer_kept(kvjax.Retention(0.25), 4000, 4)
  assert kept == (1950, 1317, 683, 50)
  assert sum(kept) == 4 * 1000


def test_retention_too_small_for_the_window_is_even():
  assert layer_kept(kvjax.Retention(0.1), 100, 4) == (10,) * 4


@pytest.mark.parametrize(
  "budget", [kvjax.Tokens(7), kvjax.Retention(0.05), kvjax.Retention(0.02)]
)
def test_no_layer_is_left_without_a_token(budget):
  kept = layer_kept(budget, 150, 7, protects=0)
  assert kept == (budget.num_kept(150),) * 7


@pytest.mark.parametrize("budget", [kvjax.Tokens(3), kvjax.Tokens(200)])
def test_even_where_there_is_nothing_to_spread(budget):
  assert layer_kept(budget, 150, 4) == (budget.num_kept(150),) * 4


@pytest.mark.parametrize("budget", [kvjax.Tokens(20), kvjax.Retention(0.3)])
def test_capacities_hold_every_row_of_the_bucket(budget):
  capacities = PYRAMID.capacities(budget, 200, Sizes((2,) * 3, 8))
  for length in bucket_lengths(200):
    kept = layer_kept(budget, length, 3)
    assert all(k <= c for k, c in zip(kept, capacities, strict=True))


def test_memory_follows_the_layers_budgets():
  model = TinyModel()
  prompts = kvjax.Prompts.of([list(range(60)) * 3, list(range(50))])
  recipe = get_recipe("pyramid/keydiff")
  assert recipe == Recipe(KeyDiff(), Pyramid(Uniform()))
  params = model.init()
  cache, _ = kvjax.prefill(
    model, params, prompts, kvjax.get_plan("pyramid/keydiff", kvjax.Tokens(40))
  )
  lengths = np.asarray(cache.lengths)
  for row, length in enumerate((180, 50)):
    kept = layer_kept(kvjax.Tokens(40), length, 2, protects=0)
    assert lengths[:, row, 0].tolist() == list(kept)
  even, _ = kvjax.prefill(
    model, params, prompts, kvjax.Plan(KeyDiff(), kvjax.Tokens(40))
  )
  # Below, the layer keeps what KeyDiff alone would with that budget.
  more = kvjax.Tokens(int(lengths[0, 0, 0]))
  plain, _ = kvjax.prefill(model, params, prompts, kvjax.Plan(KeyDiff(), more))
  assert kept_positions(cache, 0)[0] == kept_positions(plain, 0)[0]
  below, above = cache.layers
  assert above.nbytes < even.layers[1].nbytes < below.nbytes


def test_a_flat_pyramid_is_refused():
  with pytest.raises(InputError, match="beta must be 1 or more"):
    Pyramid(Uniform(), beta=0.5)
  with pytest.raises(InputError, match="beta must be 1 or more"):
    Pyramid(Uniform(), beta=float("nan"))
