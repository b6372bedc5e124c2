"""ROUGE as LongBench and as the needle heatmaps compute it.

They are not interchangeable. LongBench takes ROUGE-L from the package `rouge`
1.0.1, whose peculiarities are kept here: a text's words are a set, and the
words of the longest common subsequences are united over all pairs of
sentences. That package fails at long texts without a full stop, which
LongBench scores 0; here they have the score that they deserve, but for the
metrics that are called official.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvjax.experiments.metrics import chinese
from kvjax.experiments.metrics.libraries import library

# `rouge` walks back through its table by calling itself, once a step and once
# more at the end. Of Python's 1,000 calls LongBench's `eval.py` and the package
# have made 9 by then, and one more where words are Chinese.
_OFFICIAL_STEPS = 990
_OFFICIAL_STEPS_ZH = 989


class _Common(NamedTuple):
  """What two sentences have in common.

  Attributes:
    words: of a longest common subsequence.
    steps: that the walk to it takes; one passes a word of either sentence, or
      of both where they are the same.
  """

  words: set[str]
  steps: int


def rouge_l(
  prediction: str, reference: str, most_steps: int | None = None
) -> float:
  """F of ROUGE-L, as the package `rouge` 1.0.1 has it; 0 to 1.

  Args:
    prediction: a text.
    reference: another.
    most_steps: where two sentences take more, the score is 0; no limit if None.
  """
  said, wanted = _sentences(prediction), _sentences(reference)
  said_words = {word for sentence in said for word in sentence}
  wanted_words = {word for sentence in wanted for word in sentence}
  if not said_words or not wanted_words:
    return 0.0
  found = [_common(*pair) for pair in itertools.product(wanted, said)]
  if most_steps is not None and max(one.steps for one in found) > most_steps:
    return 0.0
  common = len(set().union(*(one.words for one in found)))
  precision, recall = common / len(said_words), common / len(wanted_words)
  return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(
  prediction: str, reference: str, most_steps: int | None = None
) -> float:
  """The same of Chinese words.

  Raises:
    InputError: jieba is not installed.
  """
  return rouge_l(
    " ".join(chinese.words(prediction)),
    " ".join(chinese.words(reference)),
    most_steps,
  )


def rouge_l_official(prediction: str, reference: str) -> float:
  """As LongBench scores it: 0 where `rouge` exceeds Python's recursion limit.

  That limit is the usual 1,000 calls; see `_OFFICIAL_STEPS`.
  """
  return rouge_l(prediction, reference, _OFFICIAL_STEPS)


def rouge_l_zh_official(prediction: str, reference: str) -> float:
  """The same of Chinese words; raises as `rouge_l_zh`."""
  return rouge_l_zh(prediction, reference, _OFFICIAL_STEPS_ZH)


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


def _common(reference: Sequence[str], prediction: Sequence[str]) -> _Common:
  """A longest common subsequence; of several, the one that `rouge` finds.

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
  found, steps = set(), 0
  i, j = len(reference), len(prediction)
  while i and j:
    steps += 1
    if reference[i - 1] == prediction[j - 1]:
      i, j = i - 1, j - 1
      found.add(reference[i])
    elif longest[i - 1][j] > longest[i][j - 1]:
      i -= 1
    else:
      j -= 1
  return _Common(found, steps)
