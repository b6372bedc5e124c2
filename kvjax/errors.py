"""Errors and warnings about a user's input."""

import contextlib
import os
import pathlib
import warnings
from collections.abc import Iterator

from kvjax.labels import name_of

# Frames that are not the user's. Constructors of dataclasses have no file, nor
# do parts of Python's own.
_OWN = (f"{pathlib.Path(__file__).parent}{os.sep}", "<string", "<frozen")

_LONGEST = 3000


class InputError(ValueError):
  """An error in what the caller passed.

  Its message is one sentence that says what is wrong and how to fix it. The
  command line prints it and exits with code 2.
  """

  def __init__(self, sentence: str) -> None:
    super().__init__(readable(sentence))


class InputWarning(UserWarning):
  """A possible mistake in what the caller passed.

  Its message is one sentence. The command line prints it and continues.
  """


def warn(sentence: str) -> None:
  """Warns of a possible mistake, at the line of the caller that made it."""
  warnings.warn(readable(sentence), InputWarning, skip_file_prefixes=_OWN)


def readable(text: str, longest: int = _LONGEST) -> str:
  """Shows what names in files may hide; leaves out the middle if it is long."""
  # Names may break lines, and move a terminal's cursor.
  shown = "".join(
    char if char.isprintable() else char.encode("unicode_escape").decode()
    for char in text
  )
  if len(shown) <= longest:
    return shown
  return f"{shown[: longest // 2]} ... {shown[-longest // 4 :]}"


def causes(error: BaseException | None) -> Iterator[BaseException]:
  """Yields an error, and those that it came from."""
  while error is not None:
    yield error
    error = error.__cause__ or error.__context__


@contextlib.contextmanager
def blamed_on(method: object) -> Iterator[None]:
  """Adds a note that names the method to errors that are not expected.

  Args:
    method: the method, which may be a stranger's.
  """
  try:
    yield
  # Kernels decline by NotImplementedError.
  except (InputError, NotImplementedError):
    raise
  except Exception as error:
    error.add_note(
      f"This happened while {name_of(method)} chose tokens. "
      "kvjax.testing.check_method says what a method must do."
    )
    raise
