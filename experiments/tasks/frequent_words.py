"""RULER's frequent words (NVIDIA/RULER, `freq_words_extraction.py`).

The text consists of invented words whose counts follow Zipf's law with exponent
2. The most frequent word is dots; the question is for the next three.
"""

import math
import random
import string

from kvjax.experiments.tasks import fitting
from kvjax.experiments.tasks.sample import Sample

NAME = "fwe"
INTRO = (
  "Read the following coded text and track the frequency of each coded word. "
  "Find the three most frequently appeared coded words. "
)
QUESTION = (
  "Question: Do not provide any explanation. Please ignore the dots '....'. "
  "What are the three most frequently appeared words in the above coded text?"
)
ANSWER_PREFIX = (
  " Answer: According to the coded text above, the three most frequently "
  "appeared words are:"
)
MAX_NEW_TOKENS = 50
DOTS = "..."

_ANSWERS = 3
_LETTERS = 6
_TOKENS_PER_WORD = 50
_ZETA_OF_2 = math.pi**2 / 6
# From this size on, the third answer is strictly more frequent than the next
# word.
_LEAST_WORDS = 53


def occurrences(words: int, rank: int) -> int:
  """Computes how often the word of a rank, from 1, occurs in a text.

  The law assumes an infinite vocabulary, so a text has fewer than `words`
  words.
  """
  return int(words / (rank**2 * _ZETA_OF_2))


def sample(rng: random.Random, length: int, count: fitting.Count) -> Sample:
  """Draws a text of invented words, of which three are frequent.

  Args:
    rng: source of all draws; equal state gives equal samples.
    length: maximum tokens of context, question, prefix and answer.
    count: counts the tokens of a text, without special tokens.

  Raises:
    TooShortError: `length` is too short for three frequent words.
  """
  number = (length - MAX_NEW_TOKENS) // _TOKENS_PER_WORD
  vocabulary = fitting.distinct(
    lambda: "".join(rng.choices(string.ascii_lowercase, k=_LETTERS)),
    max(number, _ANSWERS + 2),
    [DOTS],
  )
  seed = rng.getrandbits(64)

  def context(words: int) -> str:
    listed: list[str] = []
    for rank, word in enumerate(vocabulary, start=1):
      listed += [word] * occurrences(words, rank)
    random.Random(seed).shuffle(listed)
    return f"{INTRO}{' '.join(listed)}\n"

  return fitting.fitted(
    NAME,
    context,
    (QUESTION, ANSWER_PREFIX),
    tuple(vocabulary[1 : _ANSWERS + 1]),
    MAX_NEW_TOKENS,
    length,
    count,
    least=_LEAST_WORDS,
  )[0]
