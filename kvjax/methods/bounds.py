"""Least values of a method's options."""

from kvjax.errors import InputError
from kvjax.methods.base import Method


def check_least(method: Method, **least: int) -> None:
  """Refuses options of a method that are below their least values.

  Raises:
    InputError: names the first that is.
  """
  for name, bound in least.items():
    value = getattr(method, name)
    if value < bound:
      raise InputError(f"{name} must be {bound} or more; {value} is not.")
