"""Says what a calibration costs before it starts."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from kvjax.experiments.calibration.answers import TokenWeights, answer_of
from kvjax.experiments.calibration.measuring import measure_batch
from kvjax.experiments.report import wording
from kvjax.experiments.run import multihost
from kvjax.experiments.run.comparison import Work
from kvjax.experiments.run.estimate import Batch, estimate, expected
from kvjax.experiments.run.forecast import Pace
from kvjax.models.pretrained import Pretrained


class Foreseen(NamedTuple):
  """What a calibration will cost.

  Attributes:
    contexts: contexts to prefill.
    tokens: tokens of the contexts.
    measurements: likelihoods of answers to measure.
    pace: how long it takes; None without a batch.
  """

  contexts: int
  tokens: int
  measurements: int
  pace: Pace | None

  def __str__(self) -> str:
    counted = (
      f"{wording.count(self.contexts, 'context')} of "
      f"{wording.count(self.tokens, 'token')} in all, "
      f"{wording.count(self.measurements, 'measurement')}."
    )
    return counted if self.pace is None else f"{counted} {self.pace}"


def announce(
  lm: Pretrained, works: Sequence[Work], weights: TokenWeights | None = None
) -> None:
  """Says on stderr what is left to do, and about how long it takes.

  Args:
    lm: the model.
    works: the steps.
    weights: as for `measuring.measure`.
  """
  recites = weights is not None
  seconds = sum(_estimate(lm, work, recites) for work in works if work.batches)
  if seconds and multihost.is_first():
    print(f"{_count(works)} {expected(seconds)}", file=sys.stderr)


def foresee(
  lm: Pretrained, works: Sequence[Work], weights: TokenWeights | None = None
) -> Foreseen:
  """Counts what is left to do, and measures a batch twice; see `announce`."""
  counted = _count(works)
  batches = [one for work in works for one in work.batches]
  if batches:
    work = next(work for work in works if work.batches)
    sizes = [shape.rows * shape.context for shape, _ in batches]

    def measure() -> None:
      for _ in measure_batch(lm, work.candidates, *work.batches[0], weights):
        pass

    pace = Pace.measure(
      measure,
      len(work.batches[0][1]),
      share=sum(sizes) / sizes[0],
      shapes=len({shape for shape, _ in batches}),
    )
    return counted._replace(pace=pace)
  return counted


def _count(works: Sequence[Work]) -> Foreseen:
  batches = [one for work in works for one in work.batches]
  contexts = [q.prompts[0].context for _, asked in batches for q in asked]
  measurements = sum(len(work.missing) for work in works)
  return Foreseen(len(contexts), sum(map(len, contexts)), measurements, None)


def _estimate(lm: Pretrained, work: Work, recites: bool) -> float:
  """Estimates a step, whose caches read questions and answers at once.

  If they recite, they read their context, too.
  """
  batches = []
  for shape, asked in work.batches:
    fed = max(
      len(q.prompts[0].question) + len(answer_of(lm, *q.samples)) for q in asked
    )
    fed += shape.context if recites else 0
    batches.append(Batch(shape.rows, shape.context, fed, steps=0))
  return estimate(lm, work.candidates, batches)
