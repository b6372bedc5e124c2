"""The residual of a prompt, whose tokens devices share out between layers."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import kvjax
from kvjax.cache.sharding import gather_residual, parse_mesh, split_mesh
from kvjax.engine.prompt_programs import forward_layers
from kvjax.testing import TinyModel

RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (64, 50)]
MODEL = TinyModel()
# The mesh, the rows, and the tokens of a row that a device then has.
SHARED = {
  "one": ("model:4", 1, 16),
  "one each": ("data:2,model:2", 2, 32),
  "several": ("model:4", 2, 64),
  "one by data": ("data:4", 1, 64),
  "context": ("context:2,model:2", 1, 32),
}


def placed(axes):
  return jax.set_mesh(split_mesh(parse_mesh(axes), 2))


@pytest.mark.parametrize("case", SHARED)
def test_devices_have_some_tokens_of_a_prompt(case):
  axes, rows, tokens = SHARED[case]
  prompts = kvjax.Prompts.of(ROWS[:rows])
  with placed(axes):
    layers = forward_layers(MODEL, MODEL.init(), prompts, ())
    shapes = [
      hidden.addressable_shards[0].data.shape[1] for hidden, _ in layers
    ]
  assert shapes == [tokens, tokens]


@pytest.mark.parametrize("case", SHARED)
def test_what_is_shared_out_changes_nothing(case):
  axes, rows, _ = SHARED[case]
  prompts = kvjax.Prompts.of(ROWS[:rows])
  plan = kvjax.get_plan("keydiff", kvjax.Retention(0.5))
  expected = kvjax.prefill(MODEL, MODEL.init(), prompts, plan)[1]
  with placed(axes):
    found = kvjax.prefill(MODEL, MODEL.init(), prompts, plan)[1]
  assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_tokens_that_do_not_divide_are_whole():
  x = jax.numpy.ones((1, 7, 8))
  with placed("model:4"):
    assert gather_residual(x) is x
