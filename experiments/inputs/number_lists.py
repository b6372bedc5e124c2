"""Reads flags that are lists of whole numbers."""

import re
from collections.abc import Sequence

from kvjax.errors import InputError

# More digits are no number that a program could do anything with.
_NUMBER = re.compile("[1-9][0-9]{0,8}")
_SHOWN = 60


def parse_numbers(
  flag: str, texts: Sequence[str], example: str, most: int = 10**9
) -> list[int]:
  """Parses the values of a flag, without repetitions.

  Args:
    flag: its name.
    texts: its values.
    example: what it takes, as in `numbers of tokens such as 1024,2048`.
    most: the largest number.

  Raises:
    InputError: there is no value, or one is no integer from 1 to `most`.
  """
  distinct = dict.fromkeys(text.strip() for text in texts)
  if not distinct or not all(map(_NUMBER.fullmatch, distinct)):
    raise InputError(
      f"--{flag} takes {example}; {','.join(texts)[:_SHOWN]!r} is not."
    )
  numbers = [int(text) for text in distinct]
  if max(numbers) > most:
    raise InputError(
      f"--{flag} takes numbers of at most {most:,}; {max(numbers):,} is more."
    )
  return numbers
