"""Errors and warnings about a user's input."""


class InputError(ValueError):
  """An error in what the caller passed.

  Its message is one sentence that says what is wrong and how to fix it. The
  command line prints it and exits with code 2.
  """

  def __init__(self, sentence: str) -> None:
    # Names in files may break lines, and move a terminal's cursor.
    super().__init__(
      "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in sentence
      )
    )


class InputWarning(UserWarning):
  """A possible mistake in what the caller passed.

  Its message is one sentence. The command line prints it and continues.
  """
