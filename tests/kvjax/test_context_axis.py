"""Prompts whose tokens are shared out over the axis "context" of a mesh."""

import contextlib
import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cache.sharding import parse_mesh, split_mesh
from kvjax.testing import TinyModel, kept_positions

RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (61, 43)]
QUESTIONS = kvjax.Prompts.of([[5, 6], [1, 2, 3]])
MESHES = ("context:4", "context:2,model:2", "data:2,context:2")
HALF = kvjax.Retention(0.5)
PLANS = {
  "full": kvjax.get_plan("full", kvjax.Retention(1.0)),
  "keydiff": kvjax.get_plan("keydiff", HALF),
  "snapkv": kvjax.get_plan("snapkv:window=5", HALF),
  "lagkv": kvjax.get_plan("lagkv:sinks=2:lag=10", HALF),
  "compactor": kvjax.get_plan("compactor:chunk=16", HALF),
  "tova": kvjax.get_plan("tova", HALF),
  "ada/snapkv": kvjax.get_plan("ada/snapkv:window=5", HALF),
}


@functools.cache
def answers(name, mesh=None):
  """The cache of the prompts, its logits, and the answers."""
  model = TinyModel()
  devices = contextlib.nullcontext()
  if mesh is not None:
    devices = jax.set_mesh(split_mesh(parse_mesh(mesh), 2))
  with devices:
    params = model.init()
    prompts = kvjax.Prompts.of(ROWS)
    cache, logits = kvjax.prefill(model, params, prompts, PLANS[name])
    given = kvjax.generate(model, params, cache, QUESTIONS, kvjax.Decoding(6))
  return cache, np.asarray(logits), given.rows()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PLANS)
def test_a_shared_out_prompt_answers_as_on_one_device(name, mesh):
  one, logits, expected = answers(name)
  spread, spread_logits, found = answers(name, mesh)
  for row in range(len(ROWS)):
    assert kept_positions(spread, row) == kept_positions(one, row)
  np.testing.assert_allclose(logits, spread_logits, rtol=0, atol=1e-4)
  assert found == expected
