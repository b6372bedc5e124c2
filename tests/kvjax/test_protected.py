"""Regions of a prompt that no method may evict."""

import functools

import numpy as np
import pytest

import kvjax
from kvjax.allocation import Sizes
from kvjax.errors import InputError
from kvjax.registry.names import get_method
from kvjax.testing import TinyModel, kept_positions

# Half the time to compile, where one layer shows it all.
MODEL = TinyModel(kvjax.Geometry.uniform(1, 4, 2, 8, 4096))
PARAMS = MODEL.init()
RNG = np.random.default_rng(1)
ROWS = [RNG.permutation(64)[:n].tolist() for n in (61, 40)]
# A system prompt, a turn in the middle, and nothing in the second row but one.
PROTECTED = [
  [i < 3 or 20 <= i < 23 for i in range(61)],
  [i == 11 for i in range(40)],
]
PROMPTS = kvjax.Prompts.of(ROWS, 64, PROTECTED)
# Nothing protected, in the same program.
PLAIN = kvjax.Prompts.of(ROWS, 64, [[False] * len(row) for row in ROWS])

# Those that select in ways of their own; the contract of methods has the rest.
NAMES = [
  *("random", "h2o", "keydiff", "snapkv:window=16", "pyramidkv", "ada/keydiff"),
  *("chunkkv", "compactor", "lagkv:sinks=2:lag=6"),
  *("protokv:prototypes=20:window=4", "criticalkv:window=16"),
]


def budget_of(name):
  paper = name.startswith("lagkv:")
  return kvjax.Retention(0.5) if paper else kvjax.Tokens(20)


def counts(plan):
  """What each of the model's two heads may keep of either row."""
  lengths = np.array([61, 40])
  return plan.spread.counts(plan.fixed_budget, lengths, Sizes((2,)))[0]


@pytest.mark.parametrize("name", NAMES)
def test_protected_tokens_are_kept_within_the_budget(name):
  """With and without protection in one program."""
  plan = kvjax.get_plan(name, budget_of(name))
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  plain, _ = kvjax.prefill(MODEL, PARAMS, PLAIN, plan)
  for row, mask in enumerate(PROTECTED):
    must = set(np.flatnonzero(mask).tolist())
    for heads in kept_positions(cache, row):
      total = sum(map(len, heads))
      expected = 2 * counts(plan)[row]
      coarse = bool(plan.method.traits.coarse)
      assert total == expected or (coarse and total < expected)
      for kept in heads:
        assert must <= set(kept)
        assert kept == sorted(set(kept))
  assert kept_positions(cache, 0) != kept_positions(plain, 0)


@pytest.mark.parametrize("name", ["keydiff", "h2o", "lagkv:sinks=2:lag=6"])
def test_protection_lasts_through_blocks_and_decoding(name):
  schedule = kvjax.Schedule(block=8, every=1)
  plan = kvjax.get_plan(name, budget_of(name), schedule=schedule)
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  cache = kvjax.reserve(cache, 40)
  questions = kvjax.Prompts.of([[5, 3], [8]])
  cache = kvjax.generate(
    MODEL, PARAMS, cache, questions, kvjax.Decoding(30), keep=True
  ).cache
  for row, mask in enumerate(PROTECTED):
    for heads in kept_positions(cache, row):
      for kept in heads:
        assert set(np.flatnonzero(mask).tolist()) <= set(kept)


def test_too_much_protection_is_refused():
  def refused(name, budget, mask):
    prompts = kvjax.Prompts.of([ROWS[0]], protected=[mask])
    with pytest.raises(InputError) as caught:
      kvjax.prefill(MODEL, PARAMS, prompts, kvjax.get_plan(name, budget))
    return str(caught.value)

  wide = [i < 30 for i in range(61)]
  assert refused("keydiff", kvjax.Tokens(20), wide) == (
    "30 tokens of a prompt are protected and 20 may be kept; protect fewer or "
    "give a larger budget."
  )
  assert refused("lagkv:sinks=2:lag=6", kvjax.Retention(0.5), wide) == (
    "6 tokens of a partition of 6 are protected and 3 of it are kept; protect "
    "fewer or give a larger budget."
  )


@pytest.mark.parametrize(
  "schedule", [kvjax.Schedule(block=8), kvjax.Schedule(block=8, every=1)]
)
def test_too_much_protection_is_refused_in_blocks(schedule):
  prompts = kvjax.Prompts.of([ROWS[0]], protected=[[i < 30 for i in range(61)]])
  for name, said in (
    ("keydiff", "30 tokens of a prompt are protected and 20 may be kept"),
    ("lagkv:sinks=2:lag=6", "6 tokens of a partition of 6 are protected"),
  ):
    plan = kvjax.get_plan(name, budget_of(name), schedule=schedule)
    with pytest.raises(InputError, match=said):
      kvjax.prefill(MODEL, PARAMS, prompts, plan)


def test_too_much_protection_is_refused_while_decoding():
  prompts = kvjax.Prompts.of([ROWS[0]], protected=[[i < 30 for i in range(61)]])
  later = kvjax.get_plan(
    "keydiff", kvjax.Tokens(20), schedule=kvjax.Schedule(every=4)
  )
  plan = kvjax.get_plan("snapkv", kvjax.Tokens(40), decoding=later)
  with pytest.raises(InputError, match=r"30 tokens .* and 20 may be kept"):
    kvjax.prefill(MODEL, PARAMS, prompts, plan)


def test_the_last_partitions_of_a_whole_prompt_may_be_protected():
  """LagKV keeps them, until more tokens follow."""
  name = "lagkv:sinks=2:lag=6"
  for length, protected in ((61, 8), (13, 9)):
    mask = [i >= length - protected for i in range(length)]
    prompts = kvjax.Prompts.of([ROWS[0][:length]], protected=[mask])
    cache, _ = kvjax.prefill(
      MODEL, PARAMS, prompts, kvjax.get_plan(name, kvjax.Retention(0.25))
    )
    for heads in kept_positions(cache, 0):
      assert all(set(np.flatnonzero(mask)) <= set(kept) for kept in heads)


def test_a_mask_says_something_of_every_token():
  with pytest.raises(InputError, match=r"as each row has tokens, \[61, 40\]"):
    kvjax.Prompts.of(ROWS, protected=[[True], [False] * 40])


# With a window of 16 in a budget of 20, and where the protected ones start.
CROWDED = {
  "chunkkv:window=16:chunk=3": 5,
  "protokv:prototypes=20:window=16": 5,
  "compactor.vllm:sketch_dim=6:chunk=16:first=2:last=16": 0,
  "snapkv:window=16": 5,
  "criticalkv:window=16": 5,
}
CROWDED_BUDGETS = (kvjax.Tokens(20), kvjax.Retention(0.4))


@functools.cache
def crowded(first):
  """Ten protected tokens from `first` on, in rows of two lengths."""
  masks = [[first <= i < first + 10 for i in range(n)] for n in (61, 40)]
  prompts = kvjax.Prompts.of(ROWS, 64, masks)
  plans = [
    kvjax.get_plan(name, budget)
    for name in CROWDED
    for budget in CROWDED_BUDGETS
  ]
  caches, _ = kvjax.sweep(MODEL, PARAMS, prompts, plans)
  return {
    (plan.method, plan.budget): (plan, cache)
    for plan, cache in zip(plans, caches, strict=True)
  }


@pytest.mark.slow
@pytest.mark.parametrize("name", CROWDED)
def test_protected_tokens_come_before_the_methods_own(name):
  method, first = get_method(name), CROWDED[name]
  for budget in CROWDED_BUDGETS:
    plan, cache = crowded(first)[method, budget]
    for row, n in enumerate((61, 40)):
      for heads in kept_positions(cache, row):
        assert sum(map(len, heads)) <= 2 * counts(plan)[row]
        for kept in heads:
          assert set(range(first, first + 10)) <= set(kept)
          assert n - 1 in kept


def test_lagkv_in_tokens_checks_its_partitions_too():
  mask = [8 <= i < 14 for i in range(61)]
  prompts = kvjax.Prompts.of([ROWS[0]], protected=[mask])
  plan = kvjax.get_plan("lagkv:sinks=2:lag=6", kvjax.Tokens(30))
  with pytest.raises(InputError, match="6 tokens of a partition of 6 are"):
    kvjax.prefill(MODEL, PARAMS, prompts, plan)


def test_a_question_protects_nothing():
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(20))
  cache, _ = kvjax.prefill(MODEL, PARAMS, PLAIN, plan)
  questions = kvjax.Prompts.of([[1], [2]], protected=[[True], [False]])
  with pytest.raises(InputError, match="in what is prefilled only"):
    kvjax.generate(MODEL, PARAMS, cache, questions, kvjax.Decoding(2))
