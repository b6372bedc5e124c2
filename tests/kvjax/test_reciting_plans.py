"""Rows that keep what their caches must, to recite them."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.engine import recitation
from kvjax.errors import InputError
from kvjax.testing import TinyModel, kept_positions

MODEL = TinyModel()
PARAMS = MODEL.init()
REQUEST = kvjax.RepeatRequest((3, 1, 4), (11, 12), (13, 14, 15), (9, 2))
RNG = np.random.default_rng(0)
ROWS = [RNG.permutation(64)[:n].tolist() for n in (50, 41, 30, 18)]
PROMPTS = kvjax.Prompts.of(ROWS, repeat_request=REQUEST)
GRID = (0.2, 0.4, 0.6, 0.8)
# Tokens of some rows only.
WEIGHTS = tuple((token, 0.5) for token in sorted(ROWS[0][:20]))


def reciting(name, tau, weights=WEIGHTS, grid=GRID, **options):
  plan = kvjax.get_plan(name, kvjax.Retention(1.0), **options)
  record = kvjax.Calibration(
    *(0.0, 0.0, "tiny", plan.prompt_label, plan.per_query_head),
    tau_range=(0.1, 1.0),
    error=0.0,
    triples=1,
    preset="recite",
    grid=grid,
    token_weights=weights,
  )
  return dataclasses.replace(plan, budget=kvjax.Calibrated(record, tau))


def fixed(plan, share):
  budget = kvjax.Retention(float(share))
  return dataclasses.replace(plan, budget=budget)


def qualities(plan, weights=WEIGHTS):
  """What each retention recites, from sweeps of fixed plans."""
  whole = kvjax.get_plan("full", 1.0, per_query_head=plan.per_query_head)
  plans = [whole, *(fixed(plan, share) for share in GRID)]
  (full, *caches), _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, plans)
  found = kvjax.recited(MODEL, PARAMS, PROMPTS, full, caches, dict(weights))
  return found.T


def rule(quality, tau):
  """The retention of a row, by a loop."""
  chosen = 1.0
  for share, reached in zip(reversed(GRID), reversed(quality), strict=True):
    if reached < tau:
      break
    chosen = share
  return chosen


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("keydiff", {}),
    ("ada/keydiff", {"per_query_head": True}),
    ("kvzip:chunk=16", {}),
  ],
  ids=["keydiff", "ada", "kvzip"],
)
def test_a_row_keeps_what_the_rule_says_of_its_recitals(name, options):
  plan = reciting(name, 0.5, **options)
  quality = qualities(plan)
  # Between two qualities, so that rounding does not decide.
  ordered = np.sort(quality.ravel())
  gaps = np.diff(ordered)[4:12]
  middle = 4 + int(np.argmax(gaps))
  tau = float(ordered[middle : middle + 2].mean())
  shares = [rule(row, tau) for row in quality]
  assert len(set(shares)) > 1
  assert min(shares) < 1
  plan = reciting(name, tau, **options)
  found = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, [plan])
  np.testing.assert_allclose(found.features[0].recited, quality, rtol=1e-5)
  assert found.retentions[0].tolist() == shares
  (swept,), _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, [plan])
  alone, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  asked = [fixed(plan, share) for share in shares]
  expected, _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, asked)
  for row, theirs in enumerate(expected):
    kept = kept_positions(theirs, row)
    for ours in (found.caches[0], swept, alone):
      assert kept_positions(ours, row) == kept


def test_weights_of_tokens_decide():
  plan, same = reciting("keydiff", 0.5), reciting("keydiff", 0.5, ())
  found = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, [plan, same])
  weighed, plain = (features.recited for features in found.features)
  np.testing.assert_allclose(weighed, qualities(plan), rtol=1e-5)
  np.testing.assert_allclose(plain, qualities(plan, ()), rtol=1e-5)
  assert np.abs(weighed[0] - plain[0]).max() > 1e-3


def test_fixed_and_reciting_plans_share_a_pass():
  plans = [
    kvjax.get_plan("keydiff", kvjax.Tokens(9)),
    reciting("keydiff", 0.7),
    reciting("keydiff", 1.0),
  ]
  found = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, plans)
  assert [features.recited is None for features in found.features] == [
    True,
    False,
    # Everything is kept, whatever is recited.
    True,
  ]
  assert found.retentions[0] is None
  assert found.retentions[2].tolist() == [1] * len(ROWS)
  for cache, plan in zip(found.caches, plans, strict=True):
    alone, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
    for row in range(len(ROWS)):
      assert kept_positions(cache, row) == kept_positions(alone, row)


def test_what_evicts_while_decoding_follows_the_recitals():
  later = kvjax.Plan(
    kvjax.get_method("keydiff"),
    kvjax.Tokens(12),
    schedule=kvjax.Schedule(every=2),
  )
  plan = reciting("keydiff", 0.7)
  both = dataclasses.replace(plan, decoding=later)
  caches, _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, [plan, both])
  assert caches[1].plan is not None
  for row in range(len(ROWS)):
    assert kept_positions(caches[0], row) == kept_positions(caches[1], row)


def test_contexts_of_another_length_keep_everything():
  plan = reciting("keydiff", 0.01)
  record = dataclasses.replace(
    plan.budget.calibration, ranges=(("length", 40.0, 50.0),)
  )
  plan = dataclasses.replace(plan, budget=kvjax.Calibrated(record, 0.01))
  with pytest.warns(
    kvjax.InputWarning, match="length of 40 to 50; others keep"
  ):
    found = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, [plan])
  assert found.retentions[0].tolist() == [0.2, 0.2, 1, 1]


def test_prompts_that_cannot_be_recited_are_refused():
  plan = reciting("keydiff", 0.5)
  with pytest.raises(InputError, match="must be asked to repeat them"):
    kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
  long = kvjax.Prompts.of([[7] * 2047], repeat_request=REQUEST)
  with pytest.raises(InputError, match="recited, has 4098 tokens"):
    kvjax.sweep(MODEL, PARAMS, long, [plan])


@pytest.mark.filterwarnings("error")
def test_what_needs_no_recital_is_not_recited(monkeypatch):
  """Of a target that no promise reaches, everything is kept."""
  plan = reciting("keydiff", 0.5)
  record = dataclasses.replace(plan.budget.calibration, promises=((0.5, 0.4),))
  plan = dataclasses.replace(plan, budget=kvjax.Calibrated(record, 0.5))
  monkeypatch.setattr(recitation, "recited", None)
  found = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, [plan])
  assert found.retentions[0].tolist() == [1, 1, 1, 1]


def test_rows_without_a_token_that_counts_keep_everything():
  rare = (sorted({*ROWS[0]} - {*ROWS[1], *ROWS[2], *ROWS[3]})[0], 0.5)
  plan = reciting("keydiff", 0.01, weights=(rare,))
  with pytest.warns(kvjax.InputWarning, match="3 of 4 prompts keep everything"):
    found = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, [plan])
  assert found.retentions[0].tolist() == [0.2, 1, 1, 1]


def test_retentions_that_cannot_hold_protected_tokens_are_not_chosen():
  plan = reciting("keydiff", 0.01)
  # 11 of 50 tokens; 0.2 keeps 10 of them.
  protected = [[True] * 11 + [False] * (len(row) - 11) for row in ROWS[:2]]
  prompts = kvjax.Prompts.of(ROWS[:2], None, protected, REQUEST)
  found = kvjax.measured_sweep(MODEL, PARAMS, prompts, [plan])
  assert found.retentions[0].tolist() == [0.4, 0.4]


def test_a_row_recites_whatever_its_batch_mates_protect():
  """What is said of padding protects nothing."""
  plan = reciting("keydiff", 0.01)
  protected = np.zeros(PROMPTS.tokens.shape, bool)
  # 11 of 41 tokens; 0.2 keeps 9 of them.
  protected[1, :11] = True
  protected[:, 50:] = True
  prompts = dataclasses.replace(PROMPTS, protected=protected)
  found = kvjax.measured_sweep(MODEL, PARAMS, prompts, [plan])
  assert found.retentions[0].tolist() == [0.2, 0.4, 0.2, 0.2]
  for row, recited in enumerate(found.features[0].recited):
    (alone,) = kvjax.measured_sweep(
      MODEL, PARAMS, prompts.row(row), [plan]
    ).features
    np.testing.assert_allclose(recited, alone.recited[0], rtol=1e-4)


def test_a_retention_holds_the_protected_tokens_of_every_chunk():
  plan = reciting("chunked:length=16/keydiff", 0.01)
  # 5 of 16 tokens; 0.2 keeps 4 of them.
  protected = [[True] * 5 + [False] * (len(row) - 5) for row in ROWS[:2]]
  prompts = kvjax.Prompts.of(ROWS[:2], None, protected, REQUEST)
  found = kvjax.measured_sweep(MODEL, PARAMS, prompts, [plan])
  assert found.retentions[0].tolist() == [0.4, 0.4]
