"""Says what a calibration costs before it starts."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from kvjax.experiments.calibration.measuring import Batch, Work
from kvjax.experiments.report import wording
from kvjax.experiments.run.forecast import duration
from kvjax.models.pretrained import Pretrained


class Foreseen(NamedTuple):
  """What a calibration will cost.

  Attributes:
    contexts: contexts to prefill.
    tokens: tokens of the contexts.
    measurements: likelihoods of answers to measure.
    first: seconds of the first batch, with compilation; 0 without a batch.
    again: seconds of the same batch once more.
    total: estimated seconds of all batches.
  """

  contexts: int
  tokens: int
  measurements: int
  first: float
  again: float
  total: float

  def __str__(self) -> str:
    counted = (
      f"{wording.count(self.contexts, 'context')} of "
      f"{wording.count(self.tokens, 'token')}, "
      f"{wording.count(self.measurements, 'measurement')}."
    )
    if not self.contexts:
      return counted
    return (
      f"{counted} A first batch took {self.first:.1f} s, and "
      f"{self.again:.1f} s once it was compiled: expect up to "
      f"{duration(self.total)} for all on this machine. Nothing was written."
    )


def foresee(lm: Pretrained, works: Sequence[Work]) -> Foreseen:
  """Counts what is left to do, and measures a batch twice.

  Other batches count by their padded tokens; those of other shapes compile once
  more, as the first does.
  """
  batches = [one for work in works for one in work.batches]
  contexts = [q.prompt.context for one in batches for q in one.questions]
  tokens = sum(map(len, contexts))
  measurements = sum(len(work.missing) for work in works)
  if not batches:
    return Foreseen(0, 0, measurements, 0.0, 0.0, 0.0)
  work = next(work for work in works if work.batches)
  first, again = _time(lm, work), _time(lm, work)
  steps = list(map(_padded_tokens, batches))
  shapes = len({one.shape for one in batches})
  total = again * sum(steps) / steps[0] + shapes * max(first - again, 0.0)
  return Foreseen(len(contexts), tokens, measurements, first, again, total)


def _time(lm: Pretrained, work: Work) -> float:
  """Returns the seconds that the first batch takes."""
  began = time.monotonic()
  list(work.batches[0].measure(lm, work.candidates))
  return time.monotonic() - began


def _padded_tokens(batch: Batch) -> int:
  return batch.shape.rows * batch.shape.context
