"""Fits haystacks to a length in tokens."""

import bisect
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.errors import InputError
from kvjax.experiments.tasks import prose
from kvjax.experiments.tasks.sample import Sample

Count = Callable[[str], int]

_GUESSES = 8


class TooShortError(InputError):
  """A length that is too short for a task.

  Attributes:
    least: the minimum length of the sample in tokens.
  """

  def __init__(self, length: int, least: int, task: str = "this task"):
    """Creates a message with both lengths, and the task if it is known."""
    super().__init__(
      f"A length of {length} tokens is too short for {task}; "
      f"it needs at least {least}."
    )
    self.least = least


class ProseText:
  """Prose of any number of words, from a random starting sentence."""

  def __init__(self, rng: random.Random, essay: prose.Essay):
    """Draws the start of the prose, which wraps around at its end."""
    self._sentences = prose.sentences_of(essay)
    self._start = rng.randrange(len(self._sentences))

  def sentences(self, words: int) -> list[str]:
    """Returns the first `words` words as sentences; the last may be cut."""
    result: list[str] = []
    at = self._start
    while words > 0:
      pieces = self._sentences[at].split(" ")
      result.append(" ".join(pieces[:words]))
      words -= len(pieces)
      at = (at + 1) % len(self._sentences)
    return result


def sentences_before(sentences: Sequence[str], share: float) -> int:
  """Counts the sentences that end within a share of the words, from 0 to 1.

  Text inserted after them is at this share, or slightly before it at the start
  of a sentence.
  """
  ends = itertools.accumulate(len(text.split(" ")) for text in sentences)
  words = list(ends)
  return bisect.bisect_right(words, share * words[-1])


def insert_at[T](
  units: list[T], inserted: Sequence[T], before: Sequence[int]
) -> None:
  """Inserts each item after a number of units; these numbers ascend."""
  for item, number in reversed(list(zip(inserted, before, strict=True))):
    units.insert(number, item)


def most_units(
  cost: Callable[[int], int],
  length: int,
  *,
  least: int = 1,
  most: int | None = None,
) -> int:
  """Finds the largest number of units whose `cost` is at most `length`.

  Each cost requires tokenizing a full text, so the search extrapolates linearly
  from the last two costs. If costs are too uneven for that, it continues with
  doubling and bisection.

  Args:
    cost: tokens of a number of units; never decreases, and grows without bound
      unless `most` is given.
    length: maximum cost.
    least: minimum number of units.
    most: number of available units.

  Raises:
    TooShortError: even the minimum number of units does not fit.
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
    guess_cost = cost(guess)
    rise = (guess_cost - spent) / (guess - low)
    if guess_cost <= length:
      low, spent = guess, guess_cost
    else:
      high = guess
  return low


def fitted(
  task: str,
  context: Callable[[int], str],
  after: tuple[str, str],
  answers: tuple[str, ...],
  max_new_tokens: int,
  length: int,
  count: Count,
  *,
  least: int = 1,
  most: int | None = None,
  **about: Any,
) -> tuple[Sample, int]:
  """Makes the sample with the largest context that fits; returns its units.

  Args:
    task: name of the task.
    context: returns the text of a number of units.
    after: question and answer prefix.
    answers: references.
    max_new_tokens: maximum tokens of the answer.
    length: maximum tokens of context, question, prefix and answer.
    count: counts the tokens of a text, without special tokens.
    least: minimum number of units.
    most: number of available units.
    **about: other fields of the sample.

  Raises:
    TooShortError: even the minimum number of units does not fit.
  """
  rest = sum(map(count, after)) + max_new_tokens
  units = most_units(
    lambda n: count(context(n)) + rest, length, least=least, most=most
  )
  about["metadata"] = {"length": length, **about.get("metadata", {})}
  sample = Sample(
    context(units), *after, answers, task, max_new_tokens, **about
  )
  return sample, units


def distinct(
  draw: Callable[[], str], number: int, known: Sequence[str] = ()
) -> list[str]:
  """Draws until there are so many distinct texts, those known included."""
  found = dict.fromkeys(known)
  while len(found) < number:
    found[draw()] = None
  return list(found)
