"""Means, deltas and intervals against values worked out otherwise."""

import numpy as np
import pytest
import scipy.stats

from kvjax.errors import InputError
from kvjax.experiments.report import anova, wording
from kvjax.experiments.report.means import means, ranks


def found_by(record):
  found = means(record.summary["rows"], record.answers)
  return {mean.method: mean for mean in found}


def test_tasks_count_alike_and_cells_by_their_samples(answer, record):
  def cell(task, depth, scores, first):
    return [
      answer(task=task, depth=depth, score=score, sample=first + number)
      for number, score in enumerate(scores)
    ]

  answers = [
    *cell("a", 0.0, [100.0, 0.0, 0.0], 0),
    *cell("a", 0.5, [100.0], 3),
    *cell("b", None, [100.0], 0),
  ]
  mean = found_by(record(answers))["keydiff"]
  assert mean.tasks == {"a": pytest.approx(50, abs=0.01), "b": 100}
  assert mean.score == pytest.approx(75, abs=0.01)
  assert mean.samples == 5
  assert mean.removed == 0.75
  assert mean.delta is None


def test_the_full_cache_comes_first_and_is_what_others_are_measured_by(
  answer, record
):
  answers = [
    answer("keydiff", score=25.0),
    answer("full", score=75.0),
    answer("snapkv", score=100.0),
  ]
  found = found_by(record(answers))
  assert list(found) == ["full", "keydiff", "snapkv"]
  assert [mean.delta for mean in found.values()] == [None, -50.0, 25.0]


def test_the_interval_is_the_bootstrap_of_scipy_task_by_task(answer, record):
  rng = np.random.default_rng(1)
  scores = {"a": rng.uniform(0, 30, 20), "b": rng.uniform(60, 100, 9)}
  answers = [
    answer(task=task, sample=number, score=float(score))
    for task, own in scores.items()
    for number, score in enumerate(own)
  ]
  expected = scipy.stats.bootstrap(
    tuple(scores.values()),
    lambda a, b, axis: (a.mean(axis) + b.mean(axis)) / 2,
    method="percentile",
    n_resamples=20_000,
    rng=0,
  ).confidence_interval
  found = found_by(record(answers))["keydiff"].interval
  # 1,000 resamples have a standard error of about a tenth.
  assert found == pytest.approx(tuple(expected), abs=0.5)


def test_there_is_no_interval_without_answers(answer, record):
  of_two = record([answer(sample=0), answer(sample=1)])
  assert found_by(of_two)["keydiff"].interval[1] == 100
  unknown = of_two._replace(answers=[])
  assert found_by(unknown)["keydiff"].interval is None


@pytest.mark.parametrize(
  ("score", "bounds", "text"),
  [
    (97.4, (96.0, 98.0), "97.4 ±1.4"),
    (97.4, (91.0, 98.0), "97.4 ±6"),
    (100.0, (43.9, 100.0), "100.0 (44–100)"),
    (0.0, (0.0, 5.6), "0.0 (0–6)"),
    (0.0, (0.0, 1.44), "0.0 (0–1.4)"),
    (50.0, (48.04, 51.96), "50.0 ±2"),
    (12.3, (12.3, 15.7), "12.3 (12.3–16)"),
    (50.0, None, "50.0"),
  ],
)
def test_a_score_is_given_or_taken_where_there_is_room(score, bounds, text):
  assert wording.with_uncertainty(score, bounds) == text


def test_the_best_method_comes_first_after_the_full_cache(answer, record):
  def order(*scores):
    """Names methods in order; a score is (method, budget, score, *tasks)."""
    answers = [
      answer(method, budget, score, retention=float(budget), task=task)
      for method, budget, score, *tasks in scores
      for task in tasks or ["a"]
    ]
    ordered = record(answers).ranked.summary["rows"]
    assert len(ordered) == len(answers)
    return [f"{row['method']} {row['budget']}" for row in ordered]

  # By the mean over budgets, whose order stays.
  assert order(
    ("b", "0.5", 60.0), ("b", "0.1", 0.0), ("full", "1", 50.0),
    ("a", "0.5", 40.0), ("a", "0.1", 40.0),
  ) == ["full 1", "a 0.5", "a 0.1", "b 0.5", "b 0.1"]  # fmt: skip
  # By the budgets that all have: an easy one more is no merit.
  assert order(("b", "0.9", 90.0), ("b", "0.1", 10.0), ("a", "0.1", 20.0)) == [
    "a 0.1",
    "b 0.9",
    "b 0.1",
  ]
  # By their own where they share none.
  assert order(("b", "0.5", 10.0), ("a", "0.1", 20.0)) == ["a 0.1", "b 0.5"]
  # Means over fewer tasks come last.
  assert order(("b", "0.5", 90.0), ("a", "0.5", 20.0, "a", "b")) == [
    *("a 0.5", "a 0.5", "b 0.5")
  ]
  # Equal ones stay in their order and together.
  assert order(
    ("b", "0.5", 10.0),
    ("a", "0.5", 10.0),
    ("b", "0.1", 10.0),
    ("a", "0.1", 10.0),
  ) == ["b 0.5", "b 0.1", "a 0.5", "a 0.1"]


def test_a_headline_names_the_best_method(answer, record):
  def headline(answers):
    return wording.headline(means(record(answers).summary["rows"]))

  answers = [answer("full"), answer("b", score=20.0), answer("a", score=60.0)]
  assert headline(answers) == (
    "Best of 2 methods: a (25 %: 60.0); full cache 100.0."
  )
  tie = [*answers, answer("c", score=60.0)]
  assert headline(tie) == (
    "Best of 3 methods: a and c (25 %: 60.0); full cache 100.0."
  )
  assert headline(answers[1:2]) == "b (25 %: 20.0)."
  assert headline(answers[:1]) == ""


@pytest.mark.parametrize(
  "scores",
  [
    {"a": (40.0, 40.0), "b": (60.0, 0.0), "c": (10.0, 20.0)},
    {"a": (100 / 3, 200 / 3), "b": (50.0, 50.0), "c": (0.1, 0.2)},
    {"a": (50.0, 50.0), "b": (50.0, 50.0), "c": (50.0, 50.0)},
  ],
  ids=["apart", "equal to rounding", "equal"],
)
def test_ranks_are_those_of_scipy_by_the_mean_over_budgets(
  answer, record, scores
):
  answers = [answer("full", score=30.0)]
  answers += [
    answer(method, budget, score, retention=float(budget))
    for method, own in scores.items()
    for budget, score in zip(("0.5", "0.1"), own, strict=True)
  ]
  found = ranks(means(record(answers).summary["rows"]))
  merits = np.round([np.mean(own) for own in scores.values()], 3)
  expected = scipy.stats.rankdata(-merits, method="min")
  assert found == dict(zip(scores, expected, strict=True))


def test_no_rank_without_all_tasks(answer, record):
  answers = [answer(task="a"), answer(task="b"), answer("half", task="a")]
  assert ranks(means(record(answers).summary["rows"])) == {"keydiff": 1}


def test_trials_are_the_means_of_runs(answer, record):
  runs = [
    record([answer(score=score), answer(task="b", score=0.0)], seed=seed)
    for seed, score in enumerate((100.0, 50.0))
  ]
  assert anova.scores_of(runs) == {("keydiff", "0.25"): [50.0, 25.0]}
  other = record([answer(method="tova")])
  with pytest.raises(InputError, match="the same methods and budgets"):
    anova.scores_of([*runs, other])
