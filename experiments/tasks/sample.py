"""One question about one context, and how its answer is scored."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Sample:
  """The record that every generator and every loader yields.

  `context + question + answer_prefix` is the whole prompt. Context and
  question are tokenised separately, so that the context alone can be
  compressed.
  """

  context: str
  question: str
  answer_prefix: str
  answers: tuple[str, ...]
  task: str
  max_new_tokens: int
  metadata: Mapping[str, Any]


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
  """Share of the references that the prediction contains, case ignored.

  RULER's metric of that name, for one sample: 0 to 1.
  """
  folded = prediction.lower()
  return sum(answer.lower() in folded for answer in answers) / len(answers)
