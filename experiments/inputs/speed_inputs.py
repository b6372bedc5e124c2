"""The flag for programs that can time each method and budget alone."""

import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from kvjax.errors import InputError
from kvjax.experiments.run import multihost, speed
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.results import Samples, Settings
from kvjax.models.pretrained import Pretrained

TIMED_ROUNDS = flags.DEFINE_integer(
  "timed_rounds",
  0,
  "Also time each method and budget alone, on one prompt of each length, in so "
  "many rounds.",
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


def add_speeds(
  summary: dict[str, Any],
  lm: Pretrained,
  chosen: Sequence[Candidate],
  samples: Samples,
  settings: Settings,
  folder: pathlib.Path,
) -> None:
  """Adds times to the rows of a summary; see `speed.measure`."""
  if multihost.is_first():
    speeds = speed.measure(
      lm, chosen, samples, settings, folder, TIMED_ROUNDS.value
    )
    summary["rows"] = speed.add_to(summary["rows"], speeds)
