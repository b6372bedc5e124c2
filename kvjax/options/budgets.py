"""Budgets: how much a cache keeps, in tokens or as a share of the prompt."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from kvjax.errors import InputError
from kvjax.options.bounds import check_count, check_number, check_options

Rounding = Literal["up", "kvpress"]
# As in kvpress.
_WINDOW = 128


@dataclasses.dataclass(frozen=True)
class Tokens:
  """A budget of at most `count` tokens per KV head and layer.

  Layers with a window keep theirs, whatever the budget.

  Raises InputError if the count is no whole number of 1 or more, or has more
  than 32 bits.

  Attributes:
    count: number of tokens.

  Examples:
    >>> import kvjax
    >>> kvjax.Tokens(512).num_kept(100)
    100
  """

  count: int

  def __post_init__(self) -> None:
    check_number("A budget in tokens", self.count)
    if 0 < self.count < 1:
      raise InputError(
        f"A budget in tokens is a whole number; give the share {self.count:g} "
        f"as kvjax.Retention({self.count:g})."
      )
    if self.count < 1:
      raise InputError(
        f"A budget of {self.count} tokens keeps nothing; give 1 or more."
      )
    if self.count >= 2**31:
      raise InputError(
        f"A budget of {self.count:.3g} tokens is more than any cache holds; "
        f"give at most {2**31 - 1}."
      )
    check_count("A budget in tokens", self.count)
    # NumPy's numbers cannot be saved.
    object.__setattr__(self, "count", int(self.count))

  def num_kept(self, length: int) -> int:
    """Number of tokens kept of a row of `length` tokens."""
    return min(self.count, length)

  def __str__(self) -> str:
    return f"{self.count} tokens"


@dataclasses.dataclass(frozen=True)
class Retention:
  """A budget of a share of the row's tokens per KV head and layer.

  Layers with a window keep theirs, whatever the budget.

  Raises InputError if the share is not above 0 and at most 1, or the rounding
  is unknown.

  Attributes:
    share: above 0, at most 1.
    rounding: "up" to the next whole token; "kvpress" down to the number that
      kvpress keeps at the ratio 1 - share, n (1 - ratio) in floating point, but
      at least 1: at a ratio of 0.9, 5 of 60 tokens. Presets named after
      kvpress use the latter.

  Examples:
    >>> import kvjax
    >>> kvjax.Retention(0.25).num_kept(10)
    3
    >>> kvjax.Retention(0.25, rounding="kvpress").num_kept(10)
    2
  """

  share: float
  rounding: Rounding = "up"

  def __post_init__(self) -> None:
    check_number("A retention", self.share)
    if not 0 < self.share <= 1:
      hint = ""
      if self.share in range(2, 101):
        hint = f" ({self.share:g} % is {self.share / 100:g})"
      raise InputError(
        f"Retention is the share of the prompt that is kept, above 0 and at "
        f"most 1; {self.share:g} is not{hint}."
      )
    check_options(self)
    object.__setattr__(self, "share", float(self.share))

  def num_kept(self, length: int) -> int:
    """Number of tokens kept of a row of `length` tokens."""
    if self.rounding == "kvpress":
      # Not `length * share`: kvpress takes the ratio, and its rounding shows.
      return max(1, int(length * (1 - (1 - self.share))))
    # 0.1 * 70 is 7.000000000000001: that must not round up to 8.
    return max(1, math.ceil(self.share * length - 1e-9))

  def nearest(self, count: int) -> int:
    """The share of `count` tokens, rounded to nearest, halves up."""
    return math.floor(self.share * count + 0.5 + 1e-9)

  def __str__(self) -> str:
    return f"{self.share:g}"


Budget = Tokens | Retention


def as_budget[B](budget: float | B) -> Budget | B:
  """Returns the budget that a number stands for; any other as it is.

  A float is the share that is kept and an integer is a number of tokens. This
  holds wherever a budget is given: in `kvjax.get_plan`, `kvjax.Plan`,
  `kvjax.PerLayer` and `kvjax.SparseAttention`. So 1.0 keeps everything, and the
  integer 1, which may be meant as a share, is refused.

  Raises:
    InputError: it is text, out of range, or the integer 1.

  Examples:
    >>> from kvjax.options.budgets import as_budget
    >>> as_budget(0.5)
    Retention(share=0.5, rounding='up')
    >>> as_budget(512)
    Tokens(count=512)
  """
  if isinstance(budget, bool | np.bool_ | str):
    raise InputError(
      f"A budget is a share such as 0.5 or tokens such as 512, not {budget!r}."
    )
  # Type checkers do not know that Python's numbers are of these classes.
  if isinstance(budget, int | numbers.Integral):
    count = int(budget)
    if count == 1:
      raise InputError(
        "A budget of 1 is one token, as it is an integer; give 1.0 to keep "
        "everything, or kvjax.Tokens(1)."
      )
    return Tokens(count)
  if isinstance(budget, float | numbers.Real):
    return Retention(float(budget))
  return budget


@dataclasses.dataclass(frozen=True)
class Threshold:
  """A budget of the tokens whose score reaches a threshold, and of the last.

  Each KV head keeps as many tokens of a prompt as it needs. The method's scores
  must mean the same in all prompts, layers and heads (`Traits.score_range`), as
  those of learned gates do. What the method protects stays too, such as the
  first tokens with `FastKVzip`; `KVzap` protects nothing. A token is judged
  once, after the prompt; tokens of questions and answers all stay.

  Source: the inference of Dynamic Memory Sparsification, arXiv 2506.05345, as
  arXiv 2601.07891 (KVzap) applies it.

  Raises InputError if the score is no number, or the window no whole number of
  1 or more.

  Attributes:
    least: the lowest score that is kept; -inf keeps everything.
    window: number of last tokens that are kept whatever their score.

  Examples:
    >>> import kvjax
    >>> print(kvjax.Threshold(-4.0))
    threshold -4
  """

  least: float
  window: int = _WINDOW

  def __post_init__(self) -> None:
    if not isinstance(self.least, numbers.Real) or math.isnan(self.least):
      raise InputError(
        f"A threshold must be a score, such as -4.0, not {self.least!r:.80}."
      )
    check_count("window of a threshold", self.window)
    object.__setattr__(self, "least", float(self.least))
    object.__setattr__(self, "window", int(self.window))

  def __str__(self) -> str:
    window = "" if self.window == _WINDOW else f", window {self.window}"
    return f"threshold {self.least:g}{window}"


@dataclasses.dataclass(frozen=True)
class PerLayer:
  """A budget of its own for every layer.

  Raises InputError if there is no layer, or one whose budget is neither tokens
  nor a share.

  Attributes:
    layers: the budget of each layer of the model, the lowest first, or a number
      for it, as in `kvjax.get_plan`; those of layers that methods do not
      compress are not used.

  Examples:
    >>> import kvjax
    >>> print(kvjax.PerLayer([0.5, 0.25]))
    0.5+0.25
  """

  layers: tuple[Budget, ...]

  def __init__(self, layers: Sequence[float | Budget]) -> None:
    # The letters of a text are no budgets.
    listed: Any = None if isinstance(layers, str) else layers
    try:
      budgets = tuple(map(as_budget, listed))
    except TypeError:
      raise InputError(
        "A budget per layer is a list of budgets, as in "
        f"kvjax.PerLayer([0.5] * 16), not {layers!r:.80}."
      ) from None
    if not budgets:
      raise InputError("A budget per layer needs one for each layer.")
    for budget in budgets:
      if not isinstance(budget, Budget):
        raise InputError(
          "The budget of a layer is a share such as 0.25 or tokens such as "
          f"512; {budget!r} is neither."
        )
    # Lists are not hashable, and plans are.
    object.__setattr__(self, "layers", budgets)

  def __str__(self) -> str:
    if all(isinstance(budget, Tokens) for budget in self.layers):
      counts = (str(budget).removesuffix(" tokens") for budget in self.layers)
      return f"{'+'.join(counts)} tokens"
    return "+".join(map(str, self.layers))
