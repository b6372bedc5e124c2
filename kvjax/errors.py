"""Errors and warnings about a user's input."""


class InputError(ValueError):
  """An error in what the caller passed.

  Its message is one sentence that says what is wrong and how to fix it. The
  command line prints it and exits with code 2.
  """


class InputWarning(UserWarning):
  """A possible mistake in what the caller passed.

  Its message is one sentence. The command line prints it and continues.
  """
