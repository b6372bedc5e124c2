"""Intervals of means, of their differences and of their ratios."""

import dataclasses

import numpy as np
import pytest
import scipy.stats
from made_runs import make_answer

from kvjax.experiments.run.intervals import (
  count_samples,
  difference,
  interval,
  of_ratio,
  of_scores,
  of_values,
)


def scored(scores, **fields):
  """Samples with these scores."""
  return [
    make_answer(sample=number, score=float(score), **fields)
    for number, score in enumerate(scores)
  ]


def test_the_interval_of_a_mean_is_that_of_the_normal_for_many_samples():
  """Of R samples with deviation s: 1.96 s / sqrt(R) to either side."""
  scores = np.random.default_rng(3).normal(50, 10, 400)
  low, high = interval(scored(scores))
  assert low < scores.mean() < high
  np.testing.assert_allclose(high - low, 2 * 1.96 * scores.std() / 20, rtol=0.1)


def test_the_interval_of_scores_is_that_of_answers_with_these_scores():
  """If tasks have as many samples, for they then weigh the same."""
  scores = {"a": [70.0, 90.0, 20.0, 40.0], "b": [50.0, 55.0, 60.0, 45.0]}
  answers = [
    answer for task in scores for answer in scored(scores[task], task=task)
  ]
  assert of_scores(scores) == pytest.approx(interval(answers))
  low, high = of_scores({"a": [100.0] * 30, "b": [0.0] * 10})
  assert low < 75 < high


def test_the_interval_of_a_ratio_is_that_of_scipy():
  rng = np.random.default_rng(4)
  least = rng.uniform(0.2, 0.9, 60)
  kept = np.minimum(1.0, least + rng.uniform(0, 0.4, 60))
  found = of_ratio({"a": list(zip(kept, least, strict=True))})
  expected = scipy.stats.bootstrap(
    (kept, least),
    lambda kept, least, axis: kept.mean(axis) / least.mean(axis),
    paired=True,
    method="percentile",
    rng=np.random.default_rng(1),
  ).confidence_interval
  np.testing.assert_allclose(found, expected, atol=0.1 * np.ptp(expected))
  # Tasks that differ are resampled apart, so that their difference is none.
  apart = of_ratio({"a": [(1.0, 1.0)] * 5, "b": [(3.0, 1.0)] * 5})
  assert apart == pytest.approx((2.0, 2.0))


def test_what_was_drawn_together_is_resampled_together():
  """Turns and lengths that all say the same tell no more than one does."""
  scores = [100.0, 0.0, 0.0, 100.0, 100.0]
  expected = interval(scored(scores))
  turns = [
    make_answer(sample=8 * number + turn, score=score, turn=turn)
    for number, score in enumerate(scores)
    for turn in range(8)
  ]
  assert interval(turns) == pytest.approx(expected)
  lengths = scored(scores, length=320) + scored(scores, length=640)
  assert interval(lengths) == pytest.approx(expected)
  # By what they were drawn from, where numbers may be those of other samples.
  resumed = [
    dataclasses.replace(one, sample=number, origin=f"0.5 {one.sample}")
    for number, one in enumerate(lengths)
  ]
  assert interval(resumed) == pytest.approx(expected)
  low, high = interval(scored(scores * 8))
  assert high - low < (expected[1] - expected[0]) / 2


@pytest.mark.parametrize(
  ("answered", "right", "trials"),
  [
    ({"a": [100.0] * 20}, 20, 20),
    ({"a": [0.0] * 7}, 0, 7),
    ({"a": [50.0] * 6}, 3, 6),
    ({"a": [100.0]}, 1, 1),
    ({"a": [100.0] * 4, "b": [0.0] * 4}, 4, 8),
    # The variance of the mean is that of 2 * 2 / (1 + 1/3) = 3 answers.
    ({"a": [100.0], "b": [100.0] * 3}, 3, 3),
    # A single answer tells nothing of how its task varies.
    ({"a": [100.0], "b": [0.0, 0.0, 100.0]}, 2, 3),
  ],
)
def test_where_resampling_tells_nothing_the_interval_is_wilsons(
  answered, right, trials
):
  answers = [
    answer
    for task, scores in answered.items()
    for answer in scored(scores, task=task)
  ]
  expected = scipy.stats.binomtest(right, trials).proportion_ci(method="wilson")
  assert interval(answers) == pytest.approx([100 * b for b in expected])


def test_a_difference_is_paired_by_sample():
  """What varies between samples, but not between methods, does not count."""
  rng = np.random.default_rng(5)
  scores = rng.uniform(20, 80, 40)
  better = scored(scores + rng.uniform(2, 8, 40), method="tova")
  low, high = difference(better, scored(scores))
  assert 0 < low < 5 < high < 7
  assert np.ptp(interval(better)) > 5 * (high - low)
  # Samples that only one of them answered do not count.
  more = [*scored(scores), make_answer(sample=99, score=0.0)]
  assert difference(better, more) == pytest.approx((low, high))
  flipped = difference(scored(scores), better)
  assert flipped == pytest.approx((-high, -low), abs=0.2)


@pytest.mark.parametrize(
  ("wins", "losses", "of", "decided"),
  [
    (1, 0, 1, False),
    (4, 0, 8, False),
    (8, 0, 8, True),
    (2, 0, 30, False),
    (9, 0, 30, True),
    (9, 6, 30, False),
    (0, 0, 500, False),
  ],
)
def test_few_samples_show_no_difference(wins, losses, of, decided):
  scores = [100.0] * wins + [0.0] * (of - wins)
  others = [0.0] * (of - losses) + [100.0] * losses
  low, high = difference(scored(scores), scored(others))
  assert (low > 0) == decided
  assert -100 <= low <= 100 * (wins - losses) / of <= high + 1e-9


def test_tasks_have_the_weights_of_the_average():
  answers = [
    *scored([0.0] * 20, task="a"),
    *scored(np.linspace(0, 100, 20), task="b"),
  ]
  alone = interval([answer for answer in answers if answer.task == "b"])
  low, high = interval(answers, {"a": 0.75, "b": 0.25})
  np.testing.assert_allclose((low, high), np.array(alone) / 4, atol=1)
  assert count_samples(answers) == 40
  turns = [make_answer(sample=turn, turn=turn) for turn in range(8)]
  assert count_samples(turns) == 1


def test_the_interval_of_values_is_about_that_of_a_normal_distribution():
  rng = np.random.default_rng(5)
  values = {"a": rng.normal(3.0, 1.0, 200), "b": rng.normal(9.0, 2.0, 100)}
  low, high = of_values({task: v.tolist() for task, v in values.items()})
  # Tasks are resampled apart, so that their distance is no part of it.
  variance = sum(each.var() * len(each) for each in values.values()) / 300**2
  mean = np.concatenate([*values.values()]).mean()
  half = 1.96 * variance**0.5
  np.testing.assert_allclose((low, high), (mean - half, mean + half), rtol=0.01)
  # 90 % would be 16 % narrower, and 98 % as much wider.
  np.testing.assert_allclose((high - low) / 2, half, rtol=0.08)
  assert of_values({"a": [2.0], "b": [3.0, 3.0]}) == (8 / 3, 8 / 3)
