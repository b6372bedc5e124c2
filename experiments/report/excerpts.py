"""A few samples of a run with the answers of each method."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from kvjax.experiments.report import wording
from kvjax.experiments.report.run_files import Record
from kvjax.experiments.run.results import Answer

_SAMPLES = 12
_QUESTION, _PREDICTION = 1000, 300


class Excerpt(NamedTuple):
  """One sample.

  Attributes:
    title: the title.
    question: the question, with the start of the answer.
    references: the correct answers.
    replies: method, budget, prediction and score, the full cache first.
  """

  title: str
  question: str
  references: str
  replies: Sequence[tuple[str, str, str, str]]


def excerpts(record: Record) -> list[Excerpt]:
  """Selects the first sample of each task and length, then the second, etc."""
  samples: dict[tuple[str, int, int], list[Answer]] = {}
  for answer in record.answers:
    key = (answer.task, answer.length, answer.sample)
    samples.setdefault(key, []).append(answer)
  parts = itertools.groupby(sorted(samples), lambda key: key[:2])
  in_turns = itertools.zip_longest(*(list(keys) for _, keys in parts))
  chosen = [key for keys in in_turns for key in keys if key is not None]
  return [_excerpt(samples[key]) for key in chosen[:_SAMPLES]]


def _excerpt(answers: Sequence[Answer]) -> Excerpt:
  first = answers[0]
  title = f"{first.task}, {first.length} tokens, sample {first.sample}"
  if first.depth is not None:
    title += f", at {wording.share(first.depth)} of the context"
  if first.turn is not None:
    title += f", turn {first.turn + 1}"
  question = first.question + first.answer_prefix
  return Excerpt(
    title,
    _cut(question.strip(), _QUESTION),
    " · ".join(first.answers),
    [
      (
        answer.method,
        wording.budget(answer.method, answer.budget),
        _cut(answer.prediction.strip(), _PREDICTION) or "(nothing)",
        f"{answer.score:.1f}",
      )
      for answer in answers
    ],
  )


def _cut(text: str, limit: int) -> str:
  return text if len(text) <= limit else f"{text[:limit]} …"
