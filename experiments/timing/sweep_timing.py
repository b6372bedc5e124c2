"""Times one shared prefill against a prefill per cache."""

import functools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvjax.errors import InputError
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run import progress_bar, stopwatch
from kvjax.experiments.run.answering import Reply, Seconds, replies
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.prompting import Prompt, Shape
from kvjax.models.pretrained import Pretrained


class Timing(NamedTuple):
  """Seconds of each round.

  Attributes:
    together: seconds of a sweep.
    apart: seconds of its parts in sequence.
  """

  together: Sequence[float]
  apart: Sequence[float]


def measure(
  lm: Pretrained, chosen: Sequence[Candidate], prompt: Prompt, rounds: int
) -> Timing:
  """Answers a prompt from all caches in both ways, in turns.

  Args:
    lm: the model.
    chosen: methods and budgets.
    prompt: the prompt.
    rounds: number of timings of each way, after compilation.

  Raises:
    InputError: the answers of the two ways differ.
  """
  shape = Shape.of([prompt], 1)

  def answer(candidates: Sequence[Candidate]) -> list[Reply]:
    groups = replies(lm, candidates, [[prompt]], shape, Seconds())
    return [reply for group in groups for reply in group]

  def timed(groups: Sequence[Sequence[Candidate]]) -> float:
    return stopwatch.seconds(lambda: list(map(answer, groups)))

  alone = [[candidate] for candidate in chosen]
  with progress_bar.progress_bar(None, "compiling the sweep", transient=True):
    swept = {(r.candidate, r.text) for r in answer(chosen)}
  singly = progress_bar.track(alone, "compiling each alone")
  same = {(r.candidate, r.text) for group in singly for r in answer(group)}
  if swept != same:
    raise InputError(
      "A sweep answers otherwise than its methods alone: rounding decides "
      "between tokens; compare with --dtype=float32."
    )
  return Timing(
    *stopwatch.in_turns(
      [functools.partial(timed, groups) for groups in ([chosen], alone)],
      progress_bar.track(range(rounds), "timing"),
    )
  )


HEADING = ("caches", "one sweep, s", "one after another, s", "ratio", "range")


def table(caches: str, timing: Timing) -> Table:
  """Builds the table, given a description of the caches."""
  ratios = np.array(timing.apart) / np.array(timing.together)
  line = (
    caches,
    f"{statistics.median(timing.together):.3f}",
    f"{statistics.median(timing.apart):.3f}",
    f"{np.median(ratios):.1f}",
    f"{ratios.min():.1f}–{ratios.max():.1f}",
  )
  return Table("", HEADING, [line])
