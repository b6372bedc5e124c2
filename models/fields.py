"""Fields of a config.json, read one by one; what is wrong is gathered."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from kvjax.errors import InputError

# Of what sizes and counts may be.
LARGEST = 2**31 - 1


class ConfigError(InputError):
  """What is wrong with a config.json, all in one sentence.

  Attributes:
    faults: what is wrong; each follows the words "config.json".
  """

  def __init__(self, faults: Sequence[str]) -> None:
    super().__init__(f"config.json {'; it '.join(faults)}.")
    self.faults = tuple(faults)


class Fields:
  """Fields that are taken out as they are read.

  A value that cannot be is noted among the faults, and another stands in for
  it until `refuse_faults` ends the reading.

  Attributes:
    rest: what has not been read yet.
    faults: what is wrong; see `ConfigError`.
  """

  def __init__(self, fields: Mapping[str, Any]) -> None:
    self.rest = dict(fields)
    self.faults: list[str] = []

  def take(self, name: str, default: Any = None) -> Any:
    """A field of any type; `default` where there is none."""
    return self.rest.pop(name, default)

  def count(
    self, name: str, default: int | None = None, most: int = LARGEST
  ) -> int:
    """A positive whole number; `default` also where it is null."""
    value = self.take(name)
    value = default if value is None else value
    if value is None:
      self.faults.append(f"lacks the field {name!r}")
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
      self._wrong(name, value, "a whole number of 1 or more")
    elif value > most:
      self._wrong(name, value, f"at most {most}")
    else:
      return value
    return 1

  def epsilon(self, name: str, default: float) -> float:
    """A number of 0 or more."""
    value = self.take(name, default)
    if not is_number(value) or value < 0:
      self._wrong(name, value, "a number of 0 or more")
      return default
    return float(value)

  def flag(self, name: str) -> bool:
    """True or false; absent or null is false."""
    value = self.take(name)
    if value is None or isinstance(value, bool):
      return bool(value)
    self._wrong(name, value, "true or false")
    return False

  def names(self, name: str) -> list[str]:
    """A list of names; absent or null is an empty one."""
    value = self.take(name)
    value = [] if value is None else value
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
      return value
    self._wrong(name, value, "a list of names")
    return []

  def object(self, name: str) -> dict[str, Any]:
    """An object; absent or null is an empty one."""
    value = self.take(name)
    value = {} if value is None else value
    if isinstance(value, dict):
      return value
    self._wrong(name, value, "an object")
    return {}

  def refuse_faults(self) -> None:
    """Ends the reading.

    Raises:
      ConfigError: something was wrong.
    """
    if self.faults:
      raise ConfigError(self.faults)

  def _wrong(self, name: str, value: Any, wanted: str) -> None:
    self.faults.append(
      f"has {shown(value)} for {name!r}, which must be {wanted}"
    )


def is_number(value: Any) -> TypeGuard[float]:
  """Whether a value is a finite number that a float can hold."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return False
  try:
    return math.isfinite(float(value))
  except OverflowError:
    return False


def shown(value: Any) -> str:
  """A value as a sentence shows it, the middle of a long one left out."""
  try:
    text = repr(value)
  except ValueError:  # Python writes no whole number of so many digits.
    return "a number of thousands of digits"
  return text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}"
