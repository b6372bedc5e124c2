"""LongBench's metric of code completion (`metrics.py`)."""

from kvjax.experiments.metrics.libraries import library

_NO_CODE = ("`", "#", "//")


def code_sim(prediction: str, reference: str) -> float:
  """Similarity of the first line of code to the reference, in whole percent.

  The line is the first without a fence or the sign of a comment. LongBench
  takes the similarity from fuzzywuzzy, as it is with python-Levenshtein; its
  successor rapidfuzz gives the same number unrounded.

  Returns:
    0 to 1.

  Raises:
    InputError: rapidfuzz is not installed.
  """
  lines = prediction.lstrip("\n").split("\n")
  code = (line for line in lines if not any(sign in line for sign in _NO_CODE))
  ratio = library("rapidfuzz.fuzz").ratio(next(code, ""), reference)
  return round(ratio) / 100
