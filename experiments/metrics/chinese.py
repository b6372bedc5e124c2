"""Chinese words, which no spaces part: jieba's accurate mode."""

import functools
from collections.abc import Callable

from kvjax.experiments.metrics.libraries import library


def words(text: str) -> list[str]:
  """The words of a text, white space and punctuation among them.

  Raises:
    InputError: jieba is not installed.
  """
  return _segmenter()(text)


@functools.cache
def _segmenter() -> Callable[[str], list[str]]:
  """Segments with jieba's own dictionary; takes a second to build.

  jieba's `initialize` would do the same, but tell of it on stderr, and load a
  file of that name from the shared folder for temporary files, whoever has
  put it there.
  """
  segmenter = library("jieba").Tokenizer()
  dictionary = segmenter.gen_pfdict(segmenter.get_dict_file())
  segmenter.FREQ, segmenter.total = dictionary
  segmenter.initialized = True
  return segmenter.lcut
