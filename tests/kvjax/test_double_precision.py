"""Programs in JAX's 64-bit mode: positions and scores stay in 32 bits."""

import jax
import pytest

import kvjax
from kvjax.testing import TinyModel

PROMPTS = kvjax.Prompts.of([[*range(1, 30)] * 2, [*range(1, 30)]])
QUESTIONS = kvjax.Prompts.of([[7], [8, 9]])


def answered(plan):
  model = TinyModel()
  params = model.init()
  cache, logits = kvjax.prefill(model, params, PROMPTS, plan)
  decoding = kvjax.Decoding(max_new_tokens=4)
  answers = kvjax.generate(model, params, cache, QUESTIONS, decoding)
  return cache, logits, answers


@pytest.mark.parametrize(
  ("name", "schedule"),
  [
    ("keydiff", kvjax.Schedule(block=16)),
    ("h2o", kvjax.Schedule(every=2)),
    ("chunkkv", kvjax.Schedule()),
    ("ctkvr", kvjax.Schedule()),
  ],
  ids=str,
)
def test_answers_are_those_of_32_bits(name, schedule):
  plan = kvjax.get_plan(name, kvjax.Tokens(24), schedule)
  expected = answered(plan)
  # Other tests let no types be promoted; users in 64 bits do.
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    found = answered(plan)
  assert [x.dtype for x in jax.tree.leaves(found)] == [
    x.dtype for x in jax.tree.leaves(expected)
  ]
  assert found[2].rows() == expected[2].rows()
