"""What a user is told of what they gave: errors and warnings."""


class InputError(ValueError):
  """A mistake in what the caller gave.

  Its message is one sentence that says what was wrong and what would be right;
  the binaries print it and exit with code 2.
  """


class InputWarning(UserWarning):
  """Something in what the caller gave that may or may not be a mistake.

  Its message is one sentence; the binaries print it and go on.
  """
