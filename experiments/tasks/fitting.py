"""Haystacks of a given size, and the size that fits a length in tokens."""

import random
from collections.abc import Callable

from experiments.tasks import prose
from kvjax.errors import InputError


class ProseText:
  """Running prose of any number of words, from a drawn starting sentence."""

  def __init__(self, rng: random.Random, part: prose.Part):
    """Draws where the prose starts; it wraps round at its end."""
    self._sentences = prose.sentences(part)
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


def most_units(cost: Callable[[int], int], length: int) -> int:
  """The largest unit count whose `cost` in tokens is at most `length`.

  Raises `InputError` when even one unit is too many.
  """
  if cost(1) > length:
    raise InputError(
      f"A length of {length} tokens is too short for this task; "
      f"it needs at least {cost(1)}."
    )
  low, high = 1, 2
  while cost(high) <= length:
    low, high = high, 2 * high
  while high - low > 1:
    middle = (low + high) // 2
    if cost(middle) <= length:
      low = middle
    else:
      high = middle
  return low
