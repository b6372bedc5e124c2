"""LongBench's word F1 of short answers (`metrics.py`)."""

import re
import string
from collections import Counter
from collections.abc import Sequence

from kvjax.experiments.metrics import chinese

# LongBench's list, from the library zhon.
_CHINESE_PUNCTUATION = (
  "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
  "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_CHINESE_PUNCTUATION = str.maketrans(
  "", "", string.punctuation + _CHINESE_PUNCTUATION
)


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
