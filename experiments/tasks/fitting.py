"""Haystacks of a given size, and the size that fits a length in tokens."""

import bisect
import itertools
import random
from collections.abc import Callable, Sequence

from kvjax.errors import InputError
from kvjax.experiments.tasks import prose

Count = Callable[[str], int]

_GUESSES = 8


class TooShortError(InputError):
  """A length that a task does not fit.

  Attributes:
    least: the shortest length that the sample fits, in tokens.
  """

  def __init__(self, length: int, least: int):
    """Says both lengths."""
    super().__init__(
      f"A length of {length} tokens is too short for this task; "
      f"it needs at least {least}."
    )
    self.least = least


class ProseText:
  """Running prose of any number of words, from a drawn starting sentence."""

  def __init__(self, rng: random.Random, essay: prose.Essay):
    """Draws where the prose starts; it wraps round at its end."""
    self._sentences = (
      prose.sentences(essay) if isinstance(essay, str) else essay
    )
    self._start = rng.randrange(len(self._sentences))

  def sentences(self, words: int) -> list[str]:
    """The first `words` words as sentences; the last may be cut short."""
    found: list[str] = []
    at = self._start
    while words > 0:
      pieces = self._sentences[at].split(" ")
      found.append(" ".join(pieces[:words]))
      words -= len(pieces)
      at = (at + 1) % len(self._sentences)
    return found


def sentences_before(sentences: Sequence[str], share: float) -> int:
  """How many sentences end within a share of the words, from 0 to 1.

  What is inserted after them stands where the share ends, or as far before it
  as that takes to begin a sentence.
  """
  ends = itertools.accumulate(len(text.split(" ")) for text in sentences)
  words = list(ends)
  return bisect.bisect_right(words, share * words[-1])


def most_units(
  cost: Callable[[int], int],
  length: int,
  *,
  least: int = 1,
  most: int | None = None,
) -> int:
  """The largest unit count whose `cost` in tokens is at most `length`.

  To know a cost a whole text must be tokenised, so few are asked for: a guess
  goes on as the last two costs rise. Where costs are too uneven for that, the
  rest is doubled and halved.

  Args:
    cost: tokens of so many units; never falls, and rises without end unless
      `most` says where the units do.
    length: bound on the cost.
    least: fewest units that make sense.
    most: how many units there are.

  Raises:
    TooShortError: even the least units are too many.
  """
  low, spent = least, cost(least)
  if spent > length:
    raise TooShortError(length, spent)
  high = None if most is None else most + 1
  rise = spent / least
  guesses = 0
  while high is None or high - low > 1:
    guesses += 1
    if rise and guesses <= _GUESSES:
      guess = low + max(1, int((length - spent) / rise))
    else:
      guess = 2 * low if high is None else (low + high) // 2
    guess = guess if high is None else min(guess, high - 1)
    found = cost(guess)
    rise = (found - spent) / (guess - low)
    if found <= length:
      low, spent = guess, found
    else:
      high = guess
  return low


def most_units_of_prompt(
  context: Callable[[int], str],
  length: int,
  count: Count,
  *,
  after: tuple[str, str],
  max_new_tokens: int,
  least: int = 1,
  most: int | None = None,
) -> int:
  """The most units of a context that fits a length with question and answer.

  Args:
    context: the text of so many units.
    length: bound on the tokens of context, question, prefix and answer.
    count: number of tokens of a text, without special tokens.
    after: question and answer prefix.
    max_new_tokens: what the answer may take.
    least: fewest units that make sense.
    most: how many units there are.

  Raises:
    TooShortError: even the least units are too many.
  """
  rest = sum(map(count, after)) + max_new_tokens
  return most_units(
    lambda units: count(context(units)) + rest, length, least=least, most=most
  )
