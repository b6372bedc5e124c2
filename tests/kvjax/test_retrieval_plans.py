"""What plans of retrieval methods may say, and what not."""

import numpy as np
import pytest

import kvjax
from kvjax.errors import InputError
from kvjax.registry.registry import RETRIEVALS
from kvjax.testing import TinyModel

BUDGET = kvjax.Tokens(10)


@pytest.mark.parametrize(
  ("make", "sentence"),
  [
    (
      lambda: kvjax.get_plan(
        "ctkvr", BUDGET, schedule=kvjax.Schedule(block=32)
      ),
      "ctkvr indexes a whole prompt once; it cannot work with blocks of 32.",
    ),
    (
      lambda: kvjax.get_plan("flat/adakv@0.5", BUDGET),
      "flat indexes heads that keep as many tokens; those of adakv do not.",
    ),
    (
      lambda: kvjax.get_plan("flat/streaming:rerotate=true@0.5", BUDGET),
      "flat finds keys by the prompt's queries; streaming turns the keys",
    ),
    (
      lambda: kvjax.get_plan("flat/keydiff", BUDGET),
      "written as compactor@0.5 or keydiff@256, not 'keydiff'.",
    ),
    (
      lambda: kvjax.get_plan("ctkrv/keydiff@0.5", BUDGET),
      "There is no method 'ctkrv' (did you mean ctkvr or",
    ),
    (
      lambda: kvjax.get_plan("ctkrv", BUDGET),
      "There is no method 'ctkrv' (did you mean ctkvr",
    ),
  ],
)
def test_what_cannot_be_is_one_sentence(make, sentence):
  with pytest.raises(InputError) as raised:
    make()
  assert sentence in str(raised.value)


def test_presets_say_themselves_how_much_they_read():
  plan = kvjax.get_plan("ctkvr.512", kvjax.Retention(0.1))
  assert plan.sparse.budget == kvjax.Tokens(512)
  assert {r.keys for r in RETRIEVALS.presets.values()} >= {512, 1024}


@pytest.mark.parametrize("width", [1, 4])
def test_a_dense_turn_of_one_token_is_one_with_any_padding(width):
  """Its query does not count among those that have retrieved."""
  model = TinyModel()
  params = model.init()
  prompts = kvjax.Prompts.of([[*range(60)]])
  plan = kvjax.get_plan("squeezed:local=4:keys=8:window=4:turn=dense", 1.0)
  cache, _ = kvjax.prefill(model, params, prompts, plan)
  question = kvjax.Prompts.of([[7]], width)
  after = kvjax.generate(
    model,
    params,
    kvjax.reserve(cache, 8),
    question,
    kvjax.Decoding(2),
    keep=True,
  ).cache
  (stack,) = after.stacks
  np.testing.assert_array_equal(stack.index.tokens, 60 + 2)
