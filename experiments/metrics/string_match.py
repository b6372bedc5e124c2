"""RULER's metrics (NVIDIA/RULER, `scripts/eval/synthetic/constants.py`)."""

import re
from collections.abc import Sequence


def clean(prediction: str) -> str:
  """Cleans a prediction as RULER does: control characters become newlines."""
  return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
  """Computes the share of references in the prediction, ignoring case.

  This is RULER's metric of that name for one sample, 0 to 1.
  """
  contained = _contained(prediction, answers)
  return sum(contained) / len(contained)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
  """Returns 1 if the prediction contains any reference, ignoring case, else 0.

  This is RULER's metric of that name for one sample of question answering.
  """
  return float(any(_contained(prediction, answers)))


def _contained(prediction: str, answers: Sequence[str]) -> list[bool]:
  text = clean(prediction).lower()
  return [answer.lower() in text for answer in answers]
