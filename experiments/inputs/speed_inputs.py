"""The flag for programs that can time each method and budget alone."""

import rich.console
from absl import flags

from kvjax.errors import InputError
from kvjax.experiments.inputs import dry_run_inputs
from kvjax.experiments.run import environment, multihost, runner, speed

flags.adopt_module_key_flags(dry_run_inputs)

TIMED_ROUNDS = flags.DEFINE_integer(
  "timed_rounds",
  0,
  "Also time each method and budget alone, on one prompt of each length, "
  "in this many rounds, which --dry_run does not count.",
  lower_bound=0,
)


def check() -> None:
  """Rejects times of many hosts, once these have met.

  Raises:
    InputError: there is more than one.
  """
  if TIMED_ROUNDS.value and multihost.count() > 1:
    raise InputError(
      "--timed_rounds times one host alone; leave out --multihost."
    )


def answered(
  job: runner.Job, began: float, console: rich.console.Console
) -> runner.Run | None:
  """Answers, and times what --timed_rounds asks for; or says what it costs.

  Returns:
    None with --dry_run, and on hosts that write no files.

  Raises:
    InputError: see `speed.Speeds` and `runner.answer`.
  """
  if dry_run_inputs.DRY_RUN.value:
    console.print(runner.foresee(job))
    return None
  device = environment.device(job.devices)
  # Opened first: it refuses a file before answers are generated.
  speeds = speed.Speeds(job.folder, job.settings, device)
  run = runner.answer(job, began)
  if not multihost.is_first():
    return None
  if TIMED_ROUNDS.value:
    speeds.measure(job.lm, job.chosen, job.samples, TIMED_ROUNDS.value)
  run.summary["rows"] = speeds.add_to(run.summary["rows"])
  return run
