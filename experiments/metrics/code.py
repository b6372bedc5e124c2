"""LongBench's metric of code completion (`metrics.py`)."""

from kvjax.experiments.metrics.libraries import library

_NO_CODE = ("`", "#", "//")


def code_sim(prediction: str, reference: str) -> float:
  """Computes the similarity of the first line of code, in integer percent.

  It is the first line without a fence or comment sign. LongBench uses
  fuzzywuzzy with python-Levenshtein; its successor rapidfuzz gives the same
  number unrounded.

  Returns:
    0 to 1.

  Raises:
    InputError: rapidfuzz is not installed.
  """
  lines = prediction.lstrip("\n").split("\n")
  code = (line for line in lines if not any(sign in line for sign in _NO_CODE))
  ratio = library("rapidfuzz.fuzz").ratio(next(code, ""), reference)
  return round(ratio) / 100
