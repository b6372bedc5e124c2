"""Refuses flags that contradict each other, and wrong names and rates."""

from collections.abc import Collection, Sequence

from absl import flags

from kvjax.errors import InputError


def refuse_together(one: str, excluded: Sequence[str], reason: str) -> None:
  """Rejects flags that another given flag makes meaningless.

  Raises:
    InputError: flag `one` and at least one of `excluded` were given.
  """
  if not flags.FLAGS[one].present:
    return
  for other in excluded:
    if flags.FLAGS[other].present:
      raise InputError(f"--{one} and --{other} do not go together: {reason}.")


def refuse_no_methods(example: str) -> None:
  """Rejects --methods without values.

  Args:
    example: two methods that it could have.

  Raises:
    InputError: the list is empty.
  """
  if not flags.FLAGS.methods:
    raise InputError(f"--methods is empty; {example} would be two.")


def refuse_learning_rate() -> None:
  """Rejects a --learning_rate that no optimizer takes.

  Raises:
    InputError: it is not above 0 and at most 1.
  """
  rate = flags.FLAGS.learning_rate
  if rate is not None and not 0 < rate <= 1:
    raise InputError(
      f"--learning_rate is a number above 0 and at most 1; it is {rate}."
    )


def refuse_unknown(
  flag: str, names: Sequence[str], known: Collection[str]
) -> None:
  """Rejects names of a list that are not known, and a list without names.

  Raises:
    InputError: a name is unknown, or there are none.
  """
  choices = ", ".join(known)
  for name in names:
    if name not in known:
      raise InputError(f"--{flag} has {name!r}; there are {choices}.")
  if not names:
    raise InputError(f"--{flag} is empty; there are {choices}.")
