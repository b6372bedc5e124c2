"""The error that a user's own mistake raises."""


class InputError(ValueError):
  """A mistake in what the caller gave.

  Its message is one sentence that says what was wrong and what would be right;
  the binaries print it and exit with code 2.
  """
