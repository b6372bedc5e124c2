"""LongBench's metrics of classes and numbers (`metrics.py`)."""

import re
from collections.abc import Sequence


def classification(
  prediction: str, reference: str, classes: Sequence[str]
) -> float:
  """One over the number of classes that are named, if the right one is.

  A class whose name is part of the reference's is not held against the
  prediction. All such names are dropped, unlike in `classification_official`.
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
  """The same as LongBench's own code has it.

  It drops names from the list that it is going through, and so passes over the
  one that follows.
  """
  named = [name for name in classes if name in prediction]
  for name in named:
    if name in reference and name != reference:
      named.remove(name)
  return _share(named, reference)


def count(prediction: str, reference: str) -> float:
  """Share of the prediction's whole numbers that are the reference."""
  numbers = re.findall(r"\d+", prediction)
  return numbers.count(reference) / max(len(numbers), 1)


def retrieval(prediction: str, reference: str) -> float:
  """The same, where the reference is `Paragraph N`."""
  return _numbered("Paragraph ", prediction, reference)


def retrieval_zh(prediction: str, reference: str) -> float:
  """The same, where the reference is `段落N`."""
  return _numbered("段落", prediction, reference)


def _share(named: Sequence[str], reference: str) -> float:
  return 1 / len(named) if reference in named else 0.0


def _numbered(label: str, prediction: str, reference: str) -> float:
  number = re.search(rf"{label}(\d+)", reference)
  return 0.0 if number is None else count(prediction, number[1])
