"""Compactor's budgets: of the middle of a prompt, and shared by its heads."""

import dataclasses

import numpy as np
from jaxtyping import Int

from kvjax.allocation.base import Allocation, Sizes
from kvjax.options.budgets import Budget, Retention


@dataclasses.dataclass(frozen=True)
class Middle(Allocation):
  """Keeps a share of the tokens between the first and the last ones.

  Its attributes follow from the method's options and are no options.

  Attributes:
    ends: first and last tokens, which are among those that are kept even where
      they are more than a retention of the rest.
    joint: the heads of a layer share what they keep together; a retention is
      then rounded once, to the nearest, for all of them.
  """

  ends: int = dataclasses.field(default=0, metadata={"option": False})
  joint: bool = dataclasses.field(default=False, metadata={"option": False})

  @property
  def ragged(self) -> bool:
    """Heads that share keep different numbers."""
    return self.joint

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """The share of the middle, for all layers alike."""
    kept = [self._kept(budget, int(n)) for n in lengths]
    return np.tile(np.array(kept, np.int32), (sizes.layers, 1))

  def totals(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Tokens that all heads of a row keep together."""
    most = super().totals(budget, lengths, sizes)
    if not self.joint or not isinstance(budget, Retention):
      return most
    middle = np.maximum(lengths - self.ends, 0)
    nearest = [
      [budget.nearest(h * int(n)) for n in middle] for h in sizes.heads
    ]
    heads = np.array(sizes.heads)[:, None]
    return np.minimum(np.maximum(np.array(nearest), heads), most)

  def capacities(
    self, budget: Budget, padded: int, sizes: Sizes
  ) -> Int[np.ndarray, " L"]:
    """What the longest row keeps."""
    return np.full(sizes.layers, self._kept(budget, padded), np.int32)

  def _kept(self, budget: Budget, length: int) -> int:
    whole = not isinstance(budget, Retention) or budget.share == 1
    if not self.ends or whole:
      return budget.kept(length)
    return min(length, max(self.ends, budget.kept(max(length - self.ends, 0))))
