"""Options far larger than a prompt mean its length, and take no memory."""

import numpy as np
import pytest
from scoring import select

import kvjax
from kvjax.registry.names import get_recipe
from kvjax.testing import TinyModel, kept_positions, random_activations

T, HUGE = 40, 2**31 - 1


@pytest.mark.parametrize(
  ("name", "enough"),
  [
    ("compactor:chunk=", T),
    ("compactor:pool=", 2 * T - 1),
    ("compactor.vllm:leverage_chunk=", T),
    ("noncausal:chunk=", T),
    ("leverage:chunk=", T),
    ("snapkv:kernel=", 2 * T - 1),
    ("snapkv:window=", T),
    ("protokv:neighbors=", T),
    ("protokv:window=", T),
    ("lagkv:sinks=2:mode=kvpress:lag=", T),
    ("chunkkv:window=4:chunk=", T),
    ("chunkkv.kvpress/keydiff:chunk=", T),
  ],
)
def test_sizes_beyond_the_prompt(name, enough):
  seen = random_activations(0, [T, T - 11], T)
  few, many = (
    np.asarray(select(get_recipe(f"{name}{size}"), seen, 12, 12))
    for size in (enough, HUGE)
  )
  np.testing.assert_array_equal(few, many)


@pytest.mark.parametrize(
  "name", ["chunked/keydiff:length=", "finch:chunk=", "lagkv:lag="]
)
def test_chunks_beyond_the_prompt(name):
  model = TinyModel()
  prompts = kvjax.Prompts.of([[*range(3, 40)], [5, 6, 7]])
  kept = []
  for size in (T, HUGE):
    plan = kvjax.get_plan(f"{name}{size}", kvjax.Retention(0.5))
    cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
    kept.append([kept_positions(cache, row) for row in range(2)])
  assert kept[0] == kept[1]
