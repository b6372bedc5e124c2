"""Budgets: how much a cache keeps, in tokens or as a share of the prompt."""

import dataclasses
import math

from kvjax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Tokens:
  """A budget of at most `count` tokens per KV head and layer.

  Attributes:
    count: number of tokens.

  Example:
    >>> import kvjax
    >>> kvjax.Tokens(512).num_kept(100)
    100
  """

  count: int

  def __post_init__(self) -> None:
    if self.count < 1:
      raise InputError(
        f"A budget of {self.count} tokens keeps nothing; give 1 or more."
      )
    if self.count >= 2**31:
      raise InputError(
        f"A budget of {self.count:.3g} tokens is more than any cache holds; "
        f"give at most {2**31 - 1}."
      )

  def num_kept(self, length: int) -> int:
    """Number of tokens kept of a row of `length` tokens."""
    return min(self.count, length)

  def limit(self, length: int) -> int:
    """Limit of a row that keeps growing from `length` tokens."""
    del length
    return self.count

  def __str__(self) -> str:
    return f"{self.count} tokens"


@dataclasses.dataclass(frozen=True)
class Retention:
  """A budget of a share of the row's tokens per KV head and layer, rounded up.

  Attributes:
    share: above 0, at most 1.

  Example:
    >>> import kvjax
    >>> kvjax.Retention(0.25).num_kept(10)
    3
  """

  share: float

  def __post_init__(self) -> None:
    if not 0 < self.share <= 1:
      raise InputError(
        f"Retention is the share of the prompt that is kept, above 0 and at "
        f"most 1; {self.share:g} is not."
      )

  def num_kept(self, length: int) -> int:
    """Number of tokens kept of a row of `length` tokens."""
    # 0.1 * 70 is 7.000000000000001: that must not round up to 8.
    return max(1, math.ceil(self.share * length - 1e-9))

  def limit(self, length: int) -> int:
    """Limit of a row that keeps growing from `length` tokens."""
    return self.num_kept(length)

  def nearest(self, count: int) -> int:
    """The share of `count` tokens, rounded to nearest, halves up."""
    return math.floor(self.share * count + 0.5 + 1e-9)

  def __str__(self) -> str:
    return f"{self.share:g}"


Budget = Tokens | Retention
