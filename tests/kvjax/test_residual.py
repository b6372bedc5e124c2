"""The residual of prompts, whose tokens devices share out between layers."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import kvjax
from kvjax.cache.sharding import gather_residual, parse_mesh, split_mesh
from kvjax.engine import by_row
from kvjax.engine.prompt_programs import forward_layers
from kvjax.model import Geometry, LayerSpec
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


# A layer with sinks, one without a cache, and an ordinary one.
MIXED = TinyModel(
  Geometry(
    (
      LayerSpec(4, 2, 8, sinks=True),
      LayerSpec(4, 2, 8, cache=False, weights=1),
      LayerSpec(4, 2, 8, weights=2),
    ),
    4096,
  )
)
# The second reads weights of the layer, the third replays prompts.
METHODS = ["keydiff", "criticalkv", "kvzip:chunk=16:overlap=8"]
# The mesh, and the rows.
BY_ROW = {"rows": ("model:4", 3), "rows of data": ("data:2,model:2", 6)}


def drawn(rows):
  return [RNG.permutation(64)[: 48 - 3 * i].tolist() for i in range(rows)]


@pytest.mark.parametrize("case", BY_ROW)
def test_large_prompts_run_row_by_row(case, rows_alone):
  axes, rows = BY_ROW[case]
  prompts = kvjax.Prompts.of(drawn(rows))
  with placed(axes):
    sizes = jax.sharding.get_abstract_mesh().shape
    hidden = jax.numpy.ones((rows, 48, 8))
    assert by_row.is_by_row(hidden)
    layers = forward_layers(MODEL, MODEL.init(), prompts, ())
    shapes = {x.addressable_shards[0].data.shape[:2] for x, _ in layers}
  # All rows of a device, and its part of their tokens.
  assert shapes == {(rows // sizes["data"], 48 // (4 // sizes["data"]))}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", BY_ROW)
def test_rows_alone_are_as_rows_together(case, method, rows_alone):
  """In logits after the prompts, and in what answers find in their caches."""
  axes, rows = BY_ROW[case]
  request = kvjax.RepeatRequest(first=(1, 2), later=(3,), suffix=(4,))
  prompts = kvjax.Prompts.of(drawn(rows), repeat_request=request)
  plan = kvjax.get_plan(method, kvjax.Retention(0.5))
  question = kvjax.Prompts.of([[5, 6]] * rows)
  answers = kvjax.Prompts.of([[7 + row, 20] for row in range(rows)])

  def found():
    cache, logits = kvjax.prefill(MIXED, MIXED.init(), prompts, plan)
    nll = kvjax.answer_nll(MIXED, MIXED.init(), cache, question, answers)
    return np.asarray(logits), np.asarray(nll)

  expected = found()
  with placed(axes):
    alone = found()
  for ours, theirs in zip(alone, expected, strict=True):
    assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
