"""Reading of the fields of a config.json; errors are collected."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from kvjax.errors import InputError

# Maximum of sizes and counts.
LARGEST = 2**31 - 1


class ConfigError(InputError):
  """All errors of a config.json, in one sentence.

  Attributes:
    faults: the errors; each follows the words "config.json".
  """

  def __init__(self, faults: Sequence[str]) -> None:
    super().__init__(f"config.json {'; it '.join(faults)}.")
    self.faults = tuple(faults)


class Fields:
  """Fields of a file, which are removed as they are read.

  An invalid value is added to the faults and replaced by a valid one, until
  `refuse_faults` raises an error.

  Attributes:
    rest: fields that have not been read yet.
    faults: the errors; see `ConfigError`.
  """

  def __init__(self, fields: Mapping[str, Any]) -> None:
    self.rest = dict(fields)
    self.faults: list[str] = []

  def take(self, name: str, default: Any = None) -> Any:
    """Reads a field of any type; `default` if it is absent."""
    return self.rest.pop(name, default)

  def count(
    self, name: str, default: int | None = None, limit: int = LARGEST
  ) -> int:
    """Reads a positive integer; `default` if it is absent or null."""
    value = self.take(name)
    value = default if value is None else value
    if value is None:
      self.faults.append(f"lacks the field {name!r}")
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
      self._add_fault(name, value, "a whole number of 1 or more")
    elif value > limit:
      self._add_fault(name, value, f"at most {limit}")
    else:
      return value
    return 1

  def epsilon(self, name: str, default: float) -> float:
    """Reads a number from 0 to 1."""
    value = self.take(name, default)
    if not is_number(value) or value < 0:
      self._add_fault(name, value, "a number of 0 or more")
    elif value > 1:
      self._add_fault(name, value, "at most 1")
    else:
      return float(value)
    return default

  def factor(self, name: str) -> float:
    """Reads a positive number."""
    value = self.take(name)
    if is_number(value) and 1e-30 < value < 1e30:
      return float(value)
    self._add_fault(name, value, "a number above 0, and no huge one")
    return 1.0

  def flag(self, name: str) -> bool:
    """Reads a Boolean; absent or null is false."""
    value = self.take(name)
    if value is None or isinstance(value, bool):
      return bool(value)
    self._add_fault(name, value, "true or false")
    return False

  def names(self, name: str) -> list[str]:
    """Reads a list of names; absent or null is an empty list."""
    value = self.take(name)
    value = [] if value is None else value
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
      return value
    self._add_fault(name, value, "a list of names")
    return []

  def object(self, name: str) -> dict[str, Any]:
    """Reads an object; absent or null is an empty object."""
    value = self.take(name)
    value = {} if value is None else value
    if isinstance(value, dict):
      return value
    self._add_fault(name, value, "an object")
    return {}

  def refuse_faults(self) -> None:
    """Raises an error if there were any faults.

    Raises:
      ConfigError: there were.
    """
    if self.faults:
      raise ConfigError(self.faults)

  def _add_fault(self, name: str, value: Any, expected: str) -> None:
    self.faults.append(
      f"has {format_value(value)} for {name!r}, which must be {expected}"
    )


def is_number(value: Any) -> TypeGuard[float]:
  """Whether a value is a finite number that a float can represent."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return False
  try:
    return math.isfinite(float(value))
  except OverflowError:
    return False


def format_value(value: Any) -> str:
  """Formats a value for a message, without the middle of a long one."""
  try:
    text = repr(value)
  except ValueError:  # Python writes no whole number of so many digits.
    return "a number of thousands of digits"
  return text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}"
