"""RULER's metrics (NVIDIA/RULER, `scripts/eval/synthetic/constants.py`)."""

import re
from collections.abc import Sequence


def clean(prediction: str) -> str:
  """RULER's clean-up: control characters become line breaks."""
  return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
  """Share of the references that the prediction contains, case ignored.

  RULER's metric of that name, for one sample: 0 to 1.
  """
  found = _contained(prediction, answers)
  return sum(found) / len(found)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
  """1 where the prediction contains any reference, case ignored, else 0.

  RULER's metric of that name, for one sample; of the question answering tasks.
  """
  return float(any(_contained(prediction, answers)))


def _contained(prediction: str, answers: Sequence[str]) -> list[bool]:
  said = clean(prediction).lower()
  return [answer.lower() in said for answer in answers]
