"""ROUGE as LongBench and as the needle heatmaps compute it.

They are not interchangeable. LongBench takes ROUGE-L from the package `rouge`
1.0.1, whose peculiarities are kept here: a text's words are a set, and the
words of the longest common subsequences are united over all pairs of
sentences. That package fails at long texts without a full stop, which
LongBench scores 0; here they have the score that they deserve.
"""

import functools
from collections.abc import Sequence
from typing import Any

from experiments.metrics import chinese
from experiments.metrics.libraries import library


def rouge_l(prediction: str, reference: str) -> float:
  """F of ROUGE-L, as the package `rouge` 1.0.1 has it; 0 to 1."""
  said, wanted = _sentences(prediction), _sentences(reference)
  said_words = {word for sentence in said for word in sentence}
  wanted_words = {word for sentence in wanted for word in sentence}
  if not said_words or not wanted_words:
    return 0.0
  common = len(
    set().union(*(_common(one, other) for one in wanted for other in said))
  )
  precision, recall = common / len(said_words), common / len(wanted_words)
  return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(prediction: str, reference: str) -> float:
  """The same of Chinese words.

  Raises:
    InputError: jieba is not installed.
  """
  return rouge_l(
    " ".join(chinese.words(prediction)), " ".join(chinese.words(reference))
  )


def rouge_1(prediction: str, reference: str) -> float:
  """F of ROUGE-1 over stemmed words, by Google's `rouge-score`; 0 to 1.

  Raises:
    InputError: rouge-score is not installed.
  """
  return float(_scorer().score(reference, prediction)["rouge1"].fmeasure)


@functools.cache
def _scorer() -> Any:
  scorer = library("rouge_score.rouge_scorer")
  return scorer.RougeScorer(["rouge1"], use_stemmer=True)


def _sentences(text: str) -> list[list[str]]:
  """What stands between full stops; a lone blank is a word of no letters."""
  return [
    " ".join(piece.split()).split(" ") for piece in text.split(".") if piece
  ]


def _common(reference: Sequence[str], prediction: Sequence[str]) -> set[str]:
  """Words of a longest common subsequence; of several, the one `rouge` finds.

  It goes back from the ends and leaves out the prediction's word first.
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
  found = set()
  i, j = len(reference), len(prediction)
  while i and j:
    if reference[i - 1] == prediction[j - 1]:
      i, j = i - 1, j - 1
      found.add(reference[i])
    elif longest[i - 1][j] > longest[i][j - 1]:
      i -= 1
    else:
      j -= 1
  return found
