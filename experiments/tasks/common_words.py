"""RULER's common words (NVIDIA/RULER, `common_words_extraction.py`).

A numbered list contains ten words many times and others a few times. The
question is for the ten words. A solved example precedes the list. RULER draws
the words from the `wonderwords` package; the default here is this project's
lists and the words of CPython's topics.
"""

import functools
import random
import re
from collections.abc import Sequence

from kvjax.errors import InputError
from kvjax.experiments.tasks import fitting, prose, words
from kvjax.experiments.tasks.sample import Sample

NAME = "cwe"
INTRO = (
  "Below is a numbered list of words. In these words, some appear more often "
  "than others. Memorize the ones that appear most often.\n"
)
QUESTION = "Question: What are the 10 most common words in the above list?"
ANSWER_PREFIX = (
  " Answer: The top 10 words that appear most often in the list are:"
)
MAX_NEW_TOKENS = 120

_COMMON = 10
# Half of the words are uncommon, as in the example of short prompts.
_LEAST_WORDS = 2 * _COMMON
_SHORT = 4096
# A lowercase word of prose, not a part of a name or of code.
_WORD = re.compile(r"(?<![^ (\"])[a-z]{3,}(?![^ ,;:.!?)\"])")


@functools.cache
def built_in_words() -> tuple[str, ...]:
  """Collects the words of this project's lists and of all topics, sorted."""
  distinct = {*words.ADJECTIVES, *words.NOUNS}
  for part in ("train", "heldout"):
    for sentence in prose.sentences(part):
      distinct.update(_WORD.findall(sentence))
  return tuple(sorted(distinct))


class TooFewWordsError(InputError):
  """Too few distinct words for a length."""


def sample(
  rng: random.Random, length: int, count: fitting.Count, pool: Sequence[str]
) -> Sample:
  """Draws a list of words of which ten are common, after a solved example.

  From 4,096 tokens on, common words occur 30 times and others 3 times; below
  that, 6 times and once.

  Args:
    rng: source of all draws; equal state gives equal samples.
    length: maximum tokens of context, question, prefix and answer.
    count: counts the tokens of a text, without special tokens.
    pool: distinct words to draw from.

  Raises:
    TooShortError: `length` is too short for the example and twenty words.
    TooFewWordsError: there are not enough words for `length`.
  """
  short = length < _SHORT
  example = _example(rng, pool, *((20, 3, 1) if short else (40, 10, 3)))
  common_times, other_times = (6, 1) if short else (30, 3)
  drawn = rng.sample(pool, len(pool))
  seed = rng.getrandbits(64)

  def context(number: int) -> str:
    chosen = _listing(
      random.Random(seed), drawn[:number], common_times, other_times
    )
    return f"{example}{INTRO}{chosen}\n"

  drawn_sample, number = fitting.fitted(
    NAME,
    context,
    (QUESTION, ANSWER_PREFIX),
    tuple(drawn[:_COMMON]),
    MAX_NEW_TOKENS,
    length,
    count,
    least=_LEAST_WORDS,
    most=len(pool),
  )
  if number == len(pool):
    raise TooFewWordsError(
      f"The task {NAME} needs more than {len(pool)} words to fill {length} "
      "tokens; give a longer list by --words=FILE."
    )
  return drawn_sample


def _example(
  rng: random.Random,
  pool: Sequence[str],
  number: int,
  common_times: int,
  other_times: int,
) -> str:
  """Draws a full prompt with its answer."""
  drawn = rng.sample(pool, number)
  listed = _listing(rng, drawn, common_times, other_times)
  answer = _numbered(drawn[:_COMMON])
  return f"{INTRO}{listed}\n{QUESTION}{ANSWER_PREFIX} {answer}\n"


def _listing(
  rng: random.Random, drawn: Sequence[str], common_times: int, other_times: int
) -> str:
  """Shuffles the common first ten words with the uncommon others."""
  listed = [*drawn[:_COMMON]] * common_times
  listed += [*drawn[_COMMON:]] * other_times
  rng.shuffle(listed)
  return _numbered(listed)


def _numbered(listed: Sequence[str]) -> str:
  return " ".join(
    f"{number}. {word}" for number, word in enumerate(listed, start=1)
  )
