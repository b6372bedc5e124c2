"""ROUGE of LongBench and of the needle heatmaps.

They are not interchangeable. LongBench uses ROUGE-L of the package `rouge`
1.0.1, whose peculiarities are reproduced here: a text's words are a set, and
the words of the longest common subsequences are joined over all pairs of
sentences. That package fails on long texts without a full stop, which LongBench
scores as 0. Here such texts get their actual score, except in the official
metrics.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from kvjax.experiments.metrics import chinese
from kvjax.experiments.metrics.libraries import library

# `rouge` backtracks through its table recursively, with one call per step and
# one at the end. LongBench's `eval.py` and the package already use 9 of
# Python's 1,000 stack frames, and 10 for Chinese.
_OFFICIAL_STEPS = 990
_OFFICIAL_STEPS_ZH = 989


def rouge_l(
  prediction: str, reference: str, most_steps: int | None = None
) -> float:
  """Computes the F score of ROUGE-L like the package `rouge` 1.0.1, 0 to 1.

  Args:
    prediction: a text.
    reference: another text.
    most_steps: the score is 0 if two sentences need more; None for no limit.
  """
  predicted, wanted = _sentences(prediction), _sentences(reference)
  predicted_words = {word for sentence in predicted for word in sentence}
  wanted_words = {word for sentence in wanted for word in sentence}
  if not predicted_words or not wanted_words:
    return 0.0
  pairs = [_common(*pair) for pair in itertools.product(wanted, predicted)]
  if most_steps is not None and max(steps for _, steps in pairs) > most_steps:
    return 0.0
  common = len(set().union(*(words for words, _ in pairs)))
  precision, recall = common / len(predicted_words), common / len(wanted_words)
  return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(
  prediction: str, reference: str, most_steps: int | None = None
) -> float:
  """Computes ROUGE-L over Chinese words.

  Raises:
    InputError: jieba is not installed.
  """
  return rouge_l(
    " ".join(chinese.words(prediction)),
    " ".join(chinese.words(reference)),
    most_steps,
  )


# LongBench's ROUGE-L: 0 if `rouge` exceeds Python's recursion limit of 1,000.
rouge_l_official = functools.partial(rouge_l, most_steps=_OFFICIAL_STEPS)
rouge_l_zh_official = functools.partial(
  rouge_l_zh, most_steps=_OFFICIAL_STEPS_ZH
)


def rouge_1(prediction: str, reference: str) -> float:
  """Computes the F score of ROUGE-1 over stems, by Google's `rouge-score`.

  Raises:
    InputError: rouge-score is not installed.
  """
  return float(_scorer().score(reference, prediction)["rouge1"].fmeasure)


@functools.cache
def _scorer() -> Any:
  scorer = library("rouge_score.rouge_scorer")
  return scorer.RougeScorer(["rouge1"], use_stemmer=True)


def _sentences(text: str) -> list[list[str]]:
  """Splits at full stops; a lone blank is an empty word."""
  return [
    " ".join(piece.split()).split(" ") for piece in text.split(".") if piece
  ]


def _common(
  reference: Sequence[str], prediction: Sequence[str]
) -> tuple[set[str], int]:
  """Finds the longest common subsequence that `rouge` finds.

  It backtracks from the ends and skips the prediction's word first.

  Returns:
    Its words, and the steps back, each of which passes a word of either
    sentence, or of both if they are equal.
  """
  longest = [[0] * (len(prediction) + 1)]
  for word in reference:
    row = [0]
    for column, other in enumerate(prediction):
      above = longest[-1][column + 1]
      row.append(
        longest[-1][column] + 1 if word == other else max(above, row[-1])
      )
    longest.append(row)
  words, steps = set(), 0
  i, j = len(reference), len(prediction)
  while i and j:
    steps += 1
    if reference[i - 1] == prediction[j - 1]:
      i, j = i - 1, j - 1
      words.add(reference[i])
    elif longest[i - 1][j] > longest[i][j - 1]:
      i -= 1
    else:
      j -= 1
  return words, steps
