"""Summarizes the answers of a run: means over samples."""

import dataclasses
import math
import operator
import statistics
from collections.abc import Sequence
from typing import Any

from kvjax.experiments.run.candidates import FULL
from kvjax.experiments.run.intervals import interval
from kvjax.experiments.run.measured import DIGITS, rounded
from kvjax.experiments.run.results import Answer

# Starts the names of scores that count the best of k answers.
PASS = "pass@"
# The score of a right answer.
_RIGHT = 100.0

# What the answers of a row share.
_of_row = operator.attrgetter(
  "method", "options", "budget", "part", "depth", "turn"
)


def summarize(
  answers: Sequence[Answer], first_token_from_full_prompt: bool = False
) -> list[dict[str, Any]]:
  """Builds one row per method, budget, task, length, depth and turn.

  The fields of a row have the names of those of `Answer`. `score` and the other
  `scores` are means over the samples; `interval` is the confidence interval of
  `score`, see `intervals`. Scores that some older answers lack are left out. If
  the full cache has answers to the same samples, the scores include the share
  of equal first tokens.

  Args:
    answers: the answers of a run.
    first_token_from_full_prompt: whether first tokens are generated before
      compression; then they are not compared.
  """
  if not first_token_from_full_prompt:
    answers = with_same_first_token(answers)
  groups: dict[object, list[Answer]] = {}
  for answer in answers:
    groups.setdefault(_of_row(answer), []).append(answer)
  return [_row(group) for group in groups.values()]


def with_same_first_token(answers: Sequence[Answer]) -> list[Answer]:
  """Adds whether the first token equals the full cache's, where it is known."""
  full = {
    (answer.part, answer.asked): answer.first_token
    for answer in answers
    if answer.method == FULL
  }

  def compared(answer: Answer) -> Answer:
    question = (answer.part, answer.asked)
    if question not in full:
      return answer
    same = 100.0 * (answer.first_token == full[question])
    scores = answer.scores | {"same_first_token": same}
    return dataclasses.replace(answer, scores=scores)

  return [compared(answer) for answer in answers]


def _row(group: Sequence[Answer]) -> dict[str, Any]:
  first = group[0]
  values = {
    name: [getattr(answer, name) for answer in group] for name in DIGITS
  }
  # Of all answers or none, but for records of older versions.
  measured = {
    name: rounded(name, statistics.fmean(known))
    for name, known in values.items()
    if None not in known
  }
  shared = [n for n in first.scores if all(n in a.scores for a in group)]
  scores = {
    name: round(statistics.fmean(a.scores[name] for a in group), 2)
    for name in shared
  }
  return {
    "method": first.method,
    "options": first.options,
    "retention": measured.pop("retention"),
    "budget": first.budget,
    "task": first.task,
    "length": first.length,
    "depth": first.depth,
    "turn": first.turn,
    "score": scores.pop("score"),
    "interval": [round(bound, 2) for bound in interval(group)],
    "scores": scores | _passed(group),
    "samples": len(group),
    **measured,
  }


def _passed(group: Sequence[Answer]) -> dict[str, float]:
  """Computes pass@k, if several answers are drawn for a prompt.

  It is the share of prompts with a right answer among k draws, by the unbiased
  estimator of Chen et al., arXiv 2107.03374, eq. 1, for all draws and for half
  of them.
  """
  draws: dict[str | int, list[bool]] = {}
  for answer in group:
    draws.setdefault(answer.drawn_with, []).append(answer.score == _RIGHT)
  fewest = min(map(len, draws.values()))
  if group[0].draw is None or fewest < 2:
    return {}
  return {
    f"{PASS}{k}": round(
      100 * statistics.fmean(_pass_at(k, right) for right in draws.values()), 2
    )
    for k in dict.fromkeys((max(fewest // 2, 2), fewest))
  }


def _pass_at(k: int, right: Sequence[bool]) -> float:
  wrong = len(right) - sum(right)
  return 1 - math.comb(wrong, k) / math.comb(len(right), k)
