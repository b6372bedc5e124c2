"""Repeats an evaluation with other seeds and tests whether methods differ.

  python -m kvjax.experiments.trials --trials=20 -- --methods=compactor

runs `kvjax.experiments.evaluate` with the flags after `--` and a seed for each
trial, from 0 on. Sketches and random choices differ between trials; of
generated benchmarks, the samples do as well. Then it prints the mean score of
each method and budget over the trials and a one-way analysis of variance of
their means (ANOVA): of all methods, and of each with the full cache. It writes
DIR/trials.md and DIR/trials.json.

An observation is the mean score of a trial over its tasks. This is an
inference: Chari and Van Durme (arXiv 2507.08143) report a p-value of 20 trials
without saying more.
"""

import pathlib
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import rich.console
from absl import flags
from jax.scipy.special import betainc

from kvjax.errors import InputError
from kvjax.experiments import cli, reports, results
from kvjax.experiments.candidates import FULL
from kvjax.experiments.reporting import formats, records, wording
from kvjax.experiments.reporting.formats import Table
from kvjax.experiments.reporting.means import Name, means
from kvjax.experiments.reporting.records import Record

_TRIALS = flags.DEFINE_integer("trials", 20, "Number of trials.", lower_bound=2)
_OUTPUT = flags.DEFINE_string(
  "output", "results/trials", "Parent folder of the trials."
)


class Anova(NamedTuple):
  """A one-way analysis of variance; None if no group varies."""

  f: float | None
  p: float | None


def main(arguments: Sequence[str]) -> None:
  """Runs the trials, then compares the methods."""
  output = pathlib.Path(_OUTPUT.value)
  for argument in arguments:
    if argument.lstrip("-").partition("=")[0] in ("seed", "output"):
      raise InputError(
        f"{argument} does not go after --: every trial has its own seed, and "
        "--output goes before."
      )
  results.check_writable(output)
  folders = [output / f"seed_{seed}" for seed in range(_TRIALS.value)]
  for seed, folder in enumerate(folders):
    _evaluate([*arguments, f"--seed={seed}", f"--output={folder}"])
  scores = scores_of(records.find(folders))
  table = compare(scores)
  console = rich.console.Console(highlight=False)
  console.print(table)
  reports.write_text(output / "trials.md", formats.to_markdown(table))
  data = [
    {"method": method, "budget": budget, "scores": trials}
    for (method, budget), trials in scores.items()
  ]
  reports.write_json(output / "trials.json", {"trials": data})
  console.print(f"All in {output}")


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


def compare(scores: Mapping[Name, Sequence[float]]) -> Table:
  """Builds a table with a line per method, and one for all together."""
  full = next((x for name, x in scores.items() if name[0] == FULL), None)
  lines = []
  for name, trials in scores.items():
    against = Anova(None, None)
    if full is not None and name[0] != FULL:
      against = anova([full, trials])
    lines.append(
      [
        name[0],
        wording.budget(*name),
        f"{statistics.fmean(trials):.2f}",
        f"{statistics.stdev(trials):.2f}",
        *_formatted(against),
      ]
    )
  together = anova(list(scores.values())) if len(scores) > 1 else against
  nothing = [wording.NOTHING] * 3
  lines.append(["all", *nothing, *_formatted(together)])
  count = len(next(iter(scores.values())))
  header = ["method", "budget", "mean", "deviation", "F", "p"]
  title = f"{wording.count(count, 'trial')}; ANOVA with the full cache"
  return Table(title, header, lines, names=2)


def anova(groups: Sequence[Sequence[float]]) -> Anova:
  """Computes a one-way analysis of variance."""
  if all(max(group) == min(group) for group in groups):
    return Anova(None, None)
  count = sum(map(len, groups))
  mean = sum(map(sum, groups)) / count
  between = sum(
    len(group) * (statistics.fmean(group) - mean) ** 2 for group in groups
  )
  within = sum(statistics.variance(g) * (len(g) - 1) for g in groups)
  above, below = len(groups) - 1, count - len(groups)
  f = between / above / (within / below)
  # The upper tail of the F distribution.
  tail = betainc(below / 2, above / 2, below / (below + above * f))
  return Anova(f, float(tail))


def _formatted(found: Anova) -> list[str]:
  if found.f is None or found.p is None:
    return [wording.NOTHING] * 2
  return [f"{found.f:.2f}", f"{found.p:.3g}"]


def _evaluate(arguments: Sequence[str]) -> None:
  """Runs a trial on the same terminal.

  Raises:
    SystemExit: it failed, with its own message.
  """
  run = [sys.executable, "-m", "kvjax.experiments.evaluate", *arguments]
  code = subprocess.run(run).returncode
  if code:
    raise SystemExit(code)


if __name__ == "__main__":
  cli.run_on_arguments(main)
