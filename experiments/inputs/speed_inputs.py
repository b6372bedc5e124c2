"""The flag for programs that can time each method and budget alone."""

import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from kvjax.errors import InputError
from kvjax.experiments.run import environment, multihost, speed
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.results import Samples, Settings
from kvjax.models.pretrained import Pretrained

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


def opened(
  folder: pathlib.Path, settings: Settings, devices: int
) -> speed.Speeds | None:
  """Opens the times of a run, before its answers are generated.

  Args:
    folder: folder of the run.
    settings: settings of the run.
    devices: number of the model's devices.

  Returns:
    The times; None on hosts that write no files.

  Raises:
    InputError: see `speed.Speeds`.
  """
  if not multihost.is_first():
    return None
  return speed.Speeds(folder, settings, environment.device(devices))


def add_speeds(
  speeds: speed.Speeds | None,
  summary: dict[str, Any],
  lm: Pretrained,
  chosen: Sequence[Candidate],
  samples: Samples,
) -> None:
  """Times what --timed_rounds asks for, and adds all times to the rows."""
  if speeds is None:
    return
  if TIMED_ROUNDS.value:
    speeds.measure(lm, chosen, samples, TIMED_ROUNDS.value)
  summary["rows"] = speeds.add_to(summary["rows"])
