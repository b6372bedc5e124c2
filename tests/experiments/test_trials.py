"""Trials: runs with other seeds, and whether their methods differ."""

import json
import math
import statistics

import pytest
import scipy.stats
from jax.scipy.special import betainc

from kvjax.experiments.report import anova
from kvjax.experiments.report.anova import equivalence

FULL, SAME, WORSE = [50.0, 52.0, 51.0], [51.0, 50.0, 52.5], [40.0, 42.0, 41.0]
SCORES = {("full", "1"): FULL, ("a", "0.5"): SAME, ("b", "0.5"): WORSE}


def test_a_difference_is_that_of_the_analysis_of_variance():
  table = anova.compare(SCORES, margin=4.0)
  assert table.title == (
    "3 trials; ANOVA with the full cache, and p of equality within 4 points"
  )
  full, same, worse, together = table.lines
  assert list(full) == ["full", "100 %", "51.00", "1.00", "–", "–", "–"]
  # F is that of two samples: the square of t.
  t, p = scipy.stats.ttest_ind(FULL, WORSE)
  assert list(worse[4:6]) == [f"{t**2:.2f}", f"{p:.3g}"]
  assert float(same[5]) > 0.5 > 0.01 > float(together[5])


@pytest.mark.parametrize("groups", [[FULL, SAME, WORSE], [FULL, [3.0, 99.0]]])
def test_the_analysis_is_that_of_sums_of_squares(groups):
  values = [value for group in groups for value in group]
  mean = statistics.fmean(values)
  between = sum(len(g) * (statistics.fmean(g) - mean) ** 2 for g in groups)
  within = sum((v - statistics.fmean(g)) ** 2 for g in groups for v in g)
  above, below = len(groups) - 1, len(values) - len(groups)
  f = (between / above) / (within / below)
  p = float(betainc(below / 2, above / 2, below / (below + above * f)))
  assert anova.anova(groups) == pytest.approx((f, p), rel=1e-3)


def test_trials_that_do_not_vary_show_no_difference():
  assert anova.anova([[1.0, 1.0], [2.0, 2.0]]) is None
  assert anova.anova([[1.0, 1.0], [2.0, 2.5]])[1] < 0.2


@pytest.mark.parametrize("margin", [0.5, 2.0, 4.0, 12.0])
@pytest.mark.parametrize("others", [SAME, [41.0, 40.5, 43.0]])
def test_equality_within_a_margin_is_two_one_sided_t_tests(others, margin):
  """The larger p-value is that of the nearer end of the margin."""
  differences = [a - b for a, b in zip(others, FULL, strict=True)]
  freedom = len(differences) - 1
  error = statistics.stdev(differences) / math.sqrt(len(differences))
  t = (margin - abs(statistics.fmean(differences))) / error
  tail = 0.5 * float(betainc(freedom / 2, 0.5, freedom / (freedom + t * t)))
  expected = tail if t > 0 else 1 - tail
  assert equivalence(others, FULL, margin) == pytest.approx(expected, abs=1e-6)


def test_equal_differences_are_certain():
  assert equivalence([1.0, 2.0], [1.0, 2.0], 0.1) == 0
  assert equivalence([3.0, 4.0], [1.0, 2.0], 2.0) == 1
  # The differences vary by rounding alone.
  scores, others = [0.3, 0.4, 0.5], [0.2, 0.3, 0.4]
  assert equivalence(scores, others, 0.2) == 0
  assert equivalence(scores, others, 0.05) == 1


def test_equality_is_shown_where_a_difference_is_not():
  """With few trials, no difference is found even where there may be one."""
  table = anova.compare(SCORES, margin=4.0)
  _, same, worse, _ = table.lines
  assert float(same[6]) < 0.05 < float(worse[6])
  assert float(anova.compare(SCORES, margin=0.5).lines[1][6]) > 0.05
  assert float(same[5]) > 0.05


@pytest.mark.parametrize("margin", ["0", "nan"])
def test_a_margin_is_a_difference_of_scores(refusal, tmp_path, margin):
  told = refusal(
    "kvjax.experiments.trials", f"--output={tmp_path}", f"--margin={margin}"
  )
  assert "--margin is a difference of scores above 0" in told


@pytest.mark.parametrize(
  "flag", ["--seed=3", "--output=x", "--dry_run", "--nodry_run"]
)
def test_flags_of_the_trials_own_are_refused(refusal, tmp_path, flag):
  told = refusal("kvjax.experiments.trials", f"--output={tmp_path}", "--", flag)
  assert f"{flag} does not go after --" in told


def test_flags_of_evaluate_come_after_the_dashes(refusal):
  told = refusal("kvjax.experiments.trials", "--trials=2", "--methods=keydiff")
  assert "flags of evaluate come after --, as in kvjax trials" in told
  told = refusal("kvjax.experiments.trials", "--trails=2")
  assert "no flag --trails of trials (did you mean trials" in told


@pytest.mark.slow
def test_what_they_cost_is_said_before_they_run(
  run_binary, tiny_directory, tmp_path
):
  output = tmp_path / "out"
  result = run_binary(
    *("kvjax.experiments.trials", "--trials=3", "--dry_run"),
    *(f"--output={output}", "--", f"--model={tiny_directory}"),
    *("--methods=streaming", "--retention=0.5"),
    *("--benchmark=needle", "--length=128", "--samples=1"),
  )
  assert result.returncode == 0, result.stderr
  cost, *_, said = filter(None, result.stdout.splitlines())
  # Ten depths; the full cache and half of it.
  assert cost.startswith("10 contexts of ")
  assert ", 20 answers to questions" in cost
  assert said == "This is the first of 3 trials, which cost the same."
  assert not output.exists()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "file://"], ids=["folder", "address"])
def test_runs_with_other_flags_are_no_further_trials(
  run_binary, tiny_directory, tmp_path, scheme
):
  # Neither markup nor too long for a line.
  output = tmp_path / ("[bold]" + 80 * "a")
  given = f"{scheme}{output}"
  arguments = [
    *("kvjax.experiments.trials", "--trials=2", "--first_seed=3"),
    *(f"--output={given}", "--"),
    *(f"--model={tiny_directory}", "--methods=streaming", "--retention=0.5"),
    *("--benchmark=needle", "--length=128", "--samples=1"),
  ]
  for _ in range(2):
    result = run_binary(*arguments)
    assert result.returncode == 0, result.stderr
    assert f"\nAll in {given}\n" in result.stdout
    made = json.loads((output / "trials.json").read_text())
    assert [len(each["scores"]) for each in made["trials"]] == [2, 2]
  other = run_binary(*arguments, "--heads=query")
  assert other.returncode == 2
  assert f"{given}/seed_3 holds 2 runs, whose settings" in other.stderr
  # It does not wait for all trials.
  assert len([*(output / "seed_4").iterdir()]) == 1
