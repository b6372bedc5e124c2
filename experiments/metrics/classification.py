"""LongBench's metrics for classes and numbers (`metrics.py`)."""

import re
from collections.abc import Sequence


def classification(
  prediction: str, reference: str, classes: Sequence[str]
) -> float:
  """Scores a prediction of a class: 1 / number of named classes, if correct.

  Class names that are part of the reference's name do not count. All of them
  are dropped, unlike in `classification_official`.
  """
  named = [
    name
    for name in classes
    if name in prediction and (name == reference or name not in reference)
  ]
  return _share(named, reference)


def classification_official(
  prediction: str, reference: str, classes: Sequence[str]
) -> float:
  """Scores a prediction of a class with the bug of LongBench's own code.

  That code removes names from the list during iteration, which skips the name
  after each removed one.
  """
  named = [name for name in classes if name in prediction]
  for name in named:
    if name in reference and name != reference:
      named.remove(name)
  return _share(named, reference)


def count(prediction: str, reference: str) -> float:
  """Computes the share of the prediction's integers equal to the reference."""
  numbers = re.findall(r"\d+", prediction)
  return numbers.count(reference) / max(len(numbers), 1)


def retrieval(prediction: str, reference: str) -> float:
  """Computes `count` for a reference `Paragraph N`."""
  return _count_number("Paragraph ", prediction, reference)


def retrieval_zh(prediction: str, reference: str) -> float:
  """Computes `count` for a reference `段落N`."""
  return _count_number("段落", prediction, reference)


def _share(named: Sequence[str], reference: str) -> float:
  return 1 / len(named) if reference in named else 0.0


def _count_number(label: str, prediction: str, reference: str) -> float:
  number = re.search(rf"{label}(\d+)", reference)
  return 0.0 if number is None else count(prediction, number[1])
