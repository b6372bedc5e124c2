"""LongBench's metrics of classes, code and short answers (`metrics.py`)."""

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from kvjax.experiments.metrics import chinese
from kvjax.experiments.metrics.libraries import library

_NO_CODE = ("`", "#", "//")
# LongBench's list, from the library zhon.
_CHINESE_PUNCTUATION = (
  "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
  "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_CHINESE_PUNCTUATION = str.maketrans(
  "", "", string.punctuation + _CHINESE_PUNCTUATION
)


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


def normalize(text: str) -> str:
  """Normalizes as in SQuAD: lowercase, no punctuation, no articles."""
  bare = text.lower().translate(_NO_PUNCTUATION)
  return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def qa_f1(prediction: str, reference: str) -> float:
  """Computes F1 over the multiset of normalized words."""
  return _f1(normalize(prediction).split(), normalize(reference).split())


def qa_f1_zh(prediction: str, reference: str) -> float:
  """Computes F1 over Chinese words.

  Raises:
    InputError: jieba is not installed.
  """
  return _f1(_chinese(prediction), _chinese(reference))


def _chinese(text: str) -> list[str]:
  bare = (
    word.lower().translate(_NO_CHINESE_PUNCTUATION)
    for word in chinese.words(text)
  )
  return [word for word in ("".join(word.split()) for word in bare) if word]


def _f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
  common = (Counter(prediction) & Counter(reference)).total()
  return 2 * common / max(len(prediction) + len(reference), 1)
