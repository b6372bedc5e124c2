"""Tests whether methods differ, by repeated evaluations.

  kvjax trials --trials=20 -- --methods=compactor

runs `kvjax evaluate` with the flags after `--` and a seed for each trial, from
--first_seed on. Sketches and random choices differ between trials, and so do
the samples of generated benchmarks. `kvjax calibrate` draws samples with its
--seed and the next two; to test its records, begin after them, as the command
that it prints does. Then it prints the mean score of each method and budget
over the trials and one-way analyses of variance (ANOVA) of all methods, and of
each method with the full cache. A large p-value there does not show that scores
are equal. A small one in the last column does: it is the p-value of two
one-sided tests (TOST), whose null hypothesis is that the mean differs from that
of the full cache by --margin points or more. The program writes DIR/trials.md
and DIR/trials.json.

Trials take minutes to hours, as long as that many evaluations. --dry_run,
before the `--`, says what the first one costs. With `--multihost`, before `--`,
hosts that run the same command share the contexts of every trial.

An observation is the mean score of a trial over its tasks. That is our reading:
Chari and Van Durme (arXiv 2507.08143) report a p-value of 20 trials without
saying more.
"""

import pathlib
from collections.abc import Sequence

import rich.console
from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.inputs import dry_run_inputs, host_inputs
from kvjax.experiments.inputs.passed_on import passed_on
from kvjax.experiments.report import formats, run_files
from kvjax.experiments.report.anova import compare, scores_of
from kvjax.experiments.run import children, multihost, outputs
from kvjax.experiments.run.sentences import say

flags.adopt_module_key_flags(dry_run_inputs)
flags.adopt_module_key_flags(host_inputs)

_TRIALS = flags.DEFINE_integer("trials", 20, "Number of trials.", lower_bound=2)
_FIRST_SEED = flags.DEFINE_integer(
  "first_seed",
  0,
  "Seed of the first trial; the others have the next ones.",
  lower_bound=0,
)
_MARGIN = flags.DEFINE_float(
  "margin", 5.0, "Difference of scores, in points of 100, that counts as none."
)
_OUTPUT = flags.DEFINE_string(
  "output", "results/trials", "Parent folder of the trials, or its address."
)


def main(arguments: Sequence[str]) -> None:
  """Runs the trials, then compares the methods."""
  _check(arguments)
  shared = passed_on((host_inputs,))
  output, dry = _OUTPUT.value, dry_run_inputs.DRY_RUN.value
  # Of several hosts, the first one alone must be able to write, which the
  # trials check.
  if not shared:
    outputs.check_run(output, writes=not dry)
  first = _FIRST_SEED.value
  seeds = range(first, first + _TRIALS.value)
  if dry:
    _evaluate(output, first, [*arguments, *shared, "--dry_run"])
    host_inputs.start()
    say(f"This is the first of {_TRIALS.value} trials, which cost the same.")
    return
  if not shared:
    cli.announce()
  for seed in seeds:
    _evaluate(output, seed, [*arguments, *shared])
    if not shared:
      # What cannot be read ends the trials early.
      run_files.find_one(outputs.run_folder(output, _name(seed)))
  # The trials, which had the devices, met at this place themselves.
  host_inputs.start()
  folder = outputs.run_folder(output)
  if multihost.is_first():
    _report(
      folder, [run_files.find_one(folder / _name(each)) for each in seeds]
    )


def _name(seed: int) -> str:
  """Name of a trial's folder."""
  return f"seed_{seed}"


def _evaluate(output: str, seed: int, arguments: Sequence[str]) -> None:
  """Runs the trial of a seed, which sends its files itself."""
  given = [
    *(*arguments, f"--seed={seed}"),
    f"--output={output.rstrip('/')}/{_name(seed)}",
  ]
  children.run_or_exit("kvjax.experiments.evaluate", given)


def _check(arguments: Sequence[str]) -> None:
  """Refuses margins out of range, and flags that do not go after `--`."""
  if not 0 < _MARGIN.value < 100:
    raise InputError(
      f"--margin is a difference of scores above 0 and below 100; "
      f"{_MARGIN.value:g} is not."
    )
  by_module = flags.FLAGS.flags_by_module_dict()
  of_hosts = {flag.name for flag in by_module[host_inputs.__name__]}
  for argument in arguments:
    name = argument.lstrip("-").partition("=")[0]
    if name in ("seed", "output"):
      raise InputError(
        f"{argument} does not go after --: every trial has its own seed, and "
        "--output goes before."
      )
    if name in ("dry_run", "nodry_run"):
      raise InputError(
        f"{argument} does not go after --: a trial that only says what it "
        "costs has no scores; give it before."
      )
    if name in of_hosts:
      raise InputError(
        f"{argument} does not go after --: the trials and this program are on "
        "the same hosts; give it before."
      )


def _report(output: pathlib.Path, runs: Sequence[run_files.Record]) -> None:
  """Prints the comparison of the trials and writes its files."""
  scores = scores_of(runs)
  table = compare(scores, _MARGIN.value)
  rich.console.Console(highlight=False).print(table)
  outputs.write_text(output / "trials.md", formats.to_markdown(table))
  data = [
    {"method": method, "budget": budget, "scores": trials}
    for (method, budget), trials in scores.items()
  ]
  outputs.write_json(output / "trials.json", {"trials": data})
  say(f"All in {output}")


if __name__ == "__main__":
  cli.run_on_arguments(main, sends=True)
