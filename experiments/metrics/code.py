"""LongBench's metric of code completion (`metrics.py`)."""

import difflib
from collections.abc import Callable

from kvjax.experiments.metrics.libraries import library

_NO_CODE = ("`", "#", "//")


def code_sim(prediction: str, reference: str) -> float:
  """Computes the similarity of the first line of code, in integer percent.

  It is the first line without a fence or comment sign. LongBench uses
  fuzzywuzzy, here with python-Levenshtein; its successor rapidfuzz gives the
  same number unrounded.

  Returns:
    0 to 1.

  Raises:
    InputError: rapidfuzz is not installed.
  """
  return _similarity(library("rapidfuzz.fuzz").ratio, prediction, reference)


def code_sim_difflib(prediction: str, reference: str) -> float:
  """Computes `code_sim` as fuzzywuzzy does without python-Levenshtein.

  The matching blocks of difflib need not be the best ones, and it ignores
  frequent characters of lines with 200 and more.
  """

  def ratio(line: str, reference: str) -> float:
    return 100 * difflib.SequenceMatcher(None, line, reference).ratio()

  return _similarity(ratio, prediction, reference)


def _similarity(
  ratio: Callable[[str, str], float], prediction: str, reference: str
) -> float:
  lines = prediction.lstrip("\n").split("\n")
  code = (line for line in lines if not any(sign in line for sign in _NO_CODE))
  return round(ratio(next(code, ""), reference)) / 100
