"""Bounds of a method's options; NaN is outside of all of them."""

from kvjax.errors import InputError
from kvjax.methods.base import Method


def check_least(method: Method, **least: float) -> None:
  """Refuses options of a method that are below their least values.

  Raises:
    InputError: names the first that is.
  """
  for name, bound in least.items():
    value = getattr(method, name)
    if not value >= bound:
      raise InputError(f"{name} must be {bound:g} or more; {value} is not.")


def check_odd(method: Method, name: str) -> None:
  """Refuses a width that has no middle.

  Raises:
    InputError: it is even, or below 1.
  """
  value = getattr(method, name)
  if not (value >= 1 and value % 2 == 1):
    raise InputError(f"{name} must be odd and 1 or more; {value} is not.")


def check_share(method: Method, name: str) -> None:
  """Refuses what is no share of a whole.

  Raises:
    InputError: it is not between 0 and 1.
  """
  value = getattr(method, name)
  if not 0 <= value <= 1:
    raise InputError(f"{name} must be between 0 and 1; {value:g} is not.")
