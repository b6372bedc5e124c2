"""Numbers that stand for budgets: by one rule wherever a budget is given."""

import inspect

import numpy as np
import pytest

import kvjax
from kvjax.errors import InputError
from kvjax.options.budgets import as_budget

KEYDIFF = kvjax.get_method("keydiff")
QUEST = kvjax.get_retrieval("quest")
TAKEN = {
  "get_plan": lambda budget: kvjax.get_plan("keydiff", budget).budget,
  "of_a_retrieval": lambda budget: (
    kvjax.get_plan("quest", budget).sparse.budget
  ),
  "Plan": lambda budget: kvjax.Plan(KEYDIFF, budget).budget,
  "PerLayer": lambda budget: kvjax.PerLayer([budget]).layers[0],
  "SparseAttention": lambda budget: kvjax.SparseAttention(QUEST, budget).budget,
}
NUMBERS = [
  (0.25, kvjax.Retention(0.25)),
  (1.0, kvjax.Retention(1.0)),
  (64, kvjax.Tokens(64)),
  (kvjax.Tokens(3), kvjax.Tokens(3)),
]


@pytest.mark.parametrize(
  ("number", "budget"),
  [
    *NUMBERS,
    (np.float64(0.5), kvjax.Retention(0.5)),
    (np.float32(0.5), kvjax.Retention(0.5)),
    (np.int64(64), kvjax.Tokens(64)),
  ],
)
def test_a_number_is_a_share_or_tokens(number, budget):
  assert as_budget(number) == budget


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize(("number", "budget"), NUMBERS)
def test_budgets_are_taken_alike(name, number, budget):
  assert TAKEN[name](number) == budget


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize(
  ("number", "said"),
  [
    (1.5, r"above 0 and at most 1; 1\.5 is not\.$"),
    (50.0, r"at most 1; 50 is not \(50 % is 0\.5\)\.$"),
    (101.0, r"at most 1; 101 is not\.$"),
    (0.0, "above 0 and at most 1; 0 is not"),
    (0, "keeps nothing"),
    (1, "A budget of 1 is one token, .* give 1.0 to keep everything"),
    (True, "A budget is a share such as 0.5 or tokens such as 512, not True"),
  ],
)
def test_budgets_are_refused_alike(name, number, said):
  with pytest.raises(InputError, match=said):
    TAKEN[name](number)


def test_text_is_no_budget():
  with pytest.raises(InputError, match=r"such as 512, not '0\.5'"):
    as_budget("0.5")


def test_nothing_follows_a_budget_but_by_name():
  """The fifth of one would be another thing than the fifth of the other."""
  for make, what in ((kvjax.get_plan, "keydiff"), (kvjax.Plan, KEYDIFF)):
    kinds = [p.kind for p in inspect.signature(make).parameters.values()]
    assert set(kinds[2:]) == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError):
      make(what, 0.5, kvjax.Schedule())
