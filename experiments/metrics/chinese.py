"""Splits Chinese text into words with jieba's accurate mode."""

import functools
from collections.abc import Callable

from kvjax.experiments.metrics.libraries import library


def words(text: str) -> list[str]:
  """Splits a text into words, including whitespace and punctuation.

  Raises:
    InputError: jieba is not installed.
  """
  return _segmenter()(text)


@functools.cache
def _segmenter() -> Callable[[str], list[str]]:
  """Builds a segmenter with jieba's dictionary, which takes a second.

  jieba's `initialize` would do the same, but it logs to stderr and loads a
  cache file from the shared temporary folder, which anyone can write.
  """
  segmenter = library("jieba").Tokenizer()
  dictionary = segmenter.gen_pfdict(segmenter.get_dict_file())
  segmenter.FREQ, segmenter.total = dictionary
  segmenter.initialized = True
  return segmenter.lcut
