"""LongBench's F1 of the words of short answers (`metrics.py`)."""

import re
import string
from collections import Counter
from collections.abc import Sequence

from kvjax.experiments.metrics import chinese

# LongBench's list, which is that of the library zhon.
_CHINESE_PUNCTUATION = (
  "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
  "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_CHINESE_PUNCTUATION = str.maketrans(
  "", "", string.punctuation + _CHINESE_PUNCTUATION
)


def normalized(text: str) -> str:
  """Lower case, no punctuation, no articles, single blanks (SQuAD's form)."""
  bare = text.lower().translate(_NO_PUNCTUATION)
  return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def qa_f1(prediction: str, reference: str) -> float:
  """F1 of the words in normal form, each counted as often as it occurs."""
  return _f1(normalized(prediction).split(), normalized(reference).split())


def qa_f1_zh(prediction: str, reference: str) -> float:
  """The same of Chinese words.

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
