"""Metrics of the passkey task (`longctx_bench`, `eval_metrics.py`)."""

import difflib

from experiments.metrics.question_answering import normalised


def exact(prediction: str, key: str) -> float:
  """1 where the prediction contains the key, both in normal form, else 0."""
  return float(normalised(key) in normalised(prediction))


def partial(prediction: str, key: str) -> float:
  """Share of the key that the prediction has in one piece."""
  # By default, difflib overlooks what is frequent in 200 characters and more.
  matcher = difflib.SequenceMatcher(None, key, prediction, autojunk=False)
  return matcher.find_longest_match().size / len(key)
