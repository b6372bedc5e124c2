"""A comparison in one call."""

from kvjax.experiments.run import comparison
from kvjax.experiments.run.answering import Seconds
from kvjax.experiments.run.prompting import QUERY_AGNOSTIC


def compare(
  lm,
  candidates,
  samples,
  results,
  batch,
  on_answers=lambda task, new: None,
  protocol=QUERY_AGNOSTIC,
):
  """Generates the answers that `results` lacks and adds them."""
  work = comparison.pending(lm, candidates, samples, results, batch, protocol)
  comparison.answer_all(lm, work, results, on_answers, Seconds())
