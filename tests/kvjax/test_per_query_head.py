"""Caches that hold keys and values once for every query head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.testing import TinyModel, kept_positions

# Half the time to compile, where one layer shows it all.
MODEL = TinyModel(kvjax.Geometry.uniform(1, 4, 2, 8, 4096))
PARAMS = MODEL.init()
RNG = np.random.default_rng(0)
ROWS = [RNG.permutation(64)[:n].tolist() for n in (61, 40, 17)]
PROMPTS = kvjax.Prompts.of(ROWS)
QUESTIONS = kvjax.Prompts.of([[5, 3], [8], [9, 7, 9]], 8)
BUDGET = kvjax.Tokens(12)


def widened():
  """The same model without groups: every query head has a KV head."""
  geometry = kvjax.Geometry.uniform(1, 4, 4, 8, 4096)

  def repeated(weights):
    split = weights.reshape(1, MODEL.width, 2, 8)
    return jnp.repeat(split, 2, axis=2).reshape(1, MODEL.width, -1)

  layers = [
    {**w, "key": repeated(w["key"]), "value": repeated(w["value"])}
    for w in PARAMS["layers"]
  ]
  return dataclasses.replace(MODEL, geometry=geometry), {
    **PARAMS,
    "layers": layers,
  }


@pytest.mark.slow
def test_whole_prompts_are_those_of_a_model_without_groups():
  names = ("keydiff", "snapkv:window=4", "h2o", "ada/snapkv:window=4")
  plans = [kvjax.get_plan(name, BUDGET) for name in names]
  own = [dataclasses.replace(plan, per_query_head=True) for plan in plans]
  caches, logits = kvjax.sweep(MODEL, PARAMS, PROMPTS, [*own, *plans])
  model, params = widened()
  expected, reference = kvjax.sweep(model, params, PROMPTS, plans)
  np.testing.assert_allclose(logits, reference, atol=1e-5)
  for got, cache, grouped in zip(caches, expected, caches[4:], strict=False):
    for row in range(3):
      assert kept_positions(got, row) == kept_positions(cache, row)
    assert got.nbytes == cache.nbytes > 1.9 * grouped.nbytes
  # Heads of a group choose for themselves.
  kept = kept_positions(caches[0], 0)[0]
  assert kept[0] == kept[1] != kept[2]
  assert (
    kept_positions(caches[1], 0)[0][0] != kept_positions(caches[1], 0)[0][1]
  )


@pytest.mark.slow
def test_four_devices_equal_one():
  prompts = kvjax.Prompts.of([*ROWS, ROWS[1][:30]])
  plan = kvjax.get_plan("snapkv:window=4", BUDGET, per_query_head=True)
  one, logits = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    four, own = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  shard = four.stacks[0].keys.addressable_shards[0].data
  assert shard.shape[:3] == (1, 2, 2)
  for row in range(4):
    assert kept_positions(one, row) == kept_positions(four, row)
  np.testing.assert_allclose(own, logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["h2o", pytest.param("snapkv:window=4", marks=pytest.mark.slow)]
)
def test_blocks_and_decoding_are_those_of_a_model_without_groups(name):
  schedule = kvjax.Schedule(block=8, every=2)
  plan = kvjax.get_plan(name, BUDGET, schedule=schedule, per_query_head=True)
  model, params = widened()
  plain = dataclasses.replace(plan, per_query_head=False)
  runs = []
  for args in ((MODEL, PARAMS, plan), (model, params, plain)):
    cache, _ = kvjax.prefill(*args[:2], PROMPTS, args[2])
    cache = kvjax.reserve(cache, 20)
    decoding = kvjax.Decoding(10)
    runs.append(
      kvjax.generate(*args[:2], cache, QUESTIONS, decoding, keep=True)
    )
  got, expected = runs
  np.testing.assert_array_equal(got.tokens, expected.tokens)
  for row in range(3):
    assert kept_positions(got.cache, row) == kept_positions(expected.cache, row)
  assert jax.tree.map(jnp.shape, got.cache.stacks) == jax.tree.map(
    jnp.shape, expected.cache.stacks
  )
