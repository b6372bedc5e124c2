"""Errors that an error came from, and what they say."""

import re
from collections.abc import Iterator

_SAID = 200


def first_words(error: BaseException, pattern: str) -> str | None:
  """Returns what the error, or one that it came from, begins with.

  Args:
    error: the error.
    pattern: of the error's kind and text; None is returned if none matches.
  """
  for one in chain(error):
    if re.search(pattern, f"{type(one).__name__}: {one}"):
      return " ".join(str(one).split())[:_SAID].removesuffix(".")
  return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
  """Yields the error, and those that it came from."""
  while error is not None:
    yield error
    error = error.__cause__ or error.__context__
