"""Whether scores of repeated runs differ, or are equal up to a margin."""

import statistics
import types
from collections.abc import Mapping, Sequence

from kvjax import openblas
from kvjax.errors import InputError
from kvjax.experiments.report import wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.means import Name, means
from kvjax.experiments.report.run_files import Record
from kvjax.experiments.run.candidates import FULL

# F and p of a one-way analysis of variance; None if no group varies.
_Anova = tuple[float, float] | None


def scores_of(runs: Sequence[Record]) -> dict[Name, list[float]]:
  """Lists the mean score of each method and budget in each run.

  Raises:
    InputError: the runs have other methods or budgets.
  """
  scores: dict[Name, list[float]] = {}
  for run in runs:
    for mean in means(run.summary["rows"]):
      scores.setdefault(mean.name, []).append(mean.score)
  if any(len(trials) != len(runs) for trials in scores.values()):
    raise InputError(
      "The trials do not have the same methods and budgets; choose another "
      "--output for other flags."
    )
  return scores


def compare(scores: Mapping[Name, Sequence[float]], margin: float) -> Table:
  """Builds a table with a line per method, and one for all together.

  Args:
    scores: score of each method and budget in each trial.
    margin: difference from the full cache that counts as none; see
      `equivalence`.
  """
  full = next((x for name, x in scores.items() if name[0] == FULL), None)
  lines = []
  for name, trials in scores.items():
    against, equal = None, wording.NOTHING
    if full is not None and name[0] != FULL:
      against = anova([full, trials])
      equal = f"{equivalence(trials, full, margin):.3g}"
    lines.append(
      [
        name[0],
        wording.budget(*name),
        f"{statistics.fmean(trials):.2f}",
        f"{statistics.stdev(trials):.2f}",
        *_formatted(against),
        equal,
      ]
    )
  together = anova(list(scores.values())) if len(scores) > 1 else against
  nothing = [wording.NOTHING] * 3
  lines.append(["all", *nothing, *_formatted(together), wording.NOTHING])
  count = len(next(iter(scores.values())))
  within = f"p of ±{margin:g}"
  header = ["method", "budget", "mean", "deviation", "F", "p", within]
  title = (
    f"{wording.count(count, 'trial')}; ANOVA with the full cache, and p of "
    f"equality within {margin:g} points"
  )
  return Table(title, header, lines, names=2)


def anova(groups: Sequence[Sequence[float]]) -> _Anova:
  """Computes F and p of a one-way analysis of variance."""
  if all(max(group) == min(group) for group in groups):
    return None
  found = _stats().f_oneway(*groups)
  return float(found.statistic), float(found.pvalue)


def equivalence(
  scores: Sequence[float], others: Sequence[float], margin: float
) -> float:
  """Tests whether the mean difference of paired scores is within a margin.

  These are two one-sided paired t-tests (TOST; Schuirmann, 1987), of a
  difference of at most -margin and of at least margin. A small p-value shows
  equality up to the margin, whereas a large one of an analysis of variance does
  not. If all differences are the same, it is 0 or 1.

  Args:
    scores: score of each trial.
    others: scores of the same trials.
    margin: greatest difference that counts as equal, above 0.

  Returns:
    The larger p-value of the two tests.
  """
  differences = [a - b for a, b in zip(scores, others, strict=True)]
  mean = statistics.fmean(differences)
  # Rounding leaves a deviation where there is none.
  if statistics.pstdev(differences) < 1e-9 * max(abs(mean), margin):
    return float(abs(mean) >= margin)
  stats = _stats()
  tests = [
    stats.ttest_1samp(differences, -margin, alternative="greater"),
    stats.ttest_1samp(differences, margin, alternative="less"),
  ]
  return max(float(test.pvalue) for test in tests)


def _stats() -> types.ModuleType:
  """Imports SciPy's tests, which takes as long as all of a program."""
  openblas.load()
  from scipy import stats

  return stats


def _formatted(found: _Anova) -> list[str]:
  if found is None:
    return [wording.NOTHING] * 2
  return [f"{found[0]:.2f}", f"{found[1]:.3g}"]
