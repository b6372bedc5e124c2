"""Compactor's allocation: a share of the prompt's middle, for all heads."""

import dataclasses

import numpy as np
from jaxtyping import Int

from kvjax.allocation.base import Allocation, Sizes, in_all_layers
from kvjax.options.budgets import Budget, Retention


@dataclasses.dataclass(frozen=True)
class Middle(Allocation):
  """Keeps a share of the tokens between the first and the last ones.

  Its attributes follow from the method's options and are not options.

  Attributes:
    ends: number of first and last tokens, which are always kept.
    joint: whether the heads of a layer share their budget; a retention is then
      rounded once, to the nearest integer, for all of them.
  """

  ends: int = dataclasses.field(default=0, metadata={"option": False})
  joint: bool = dataclasses.field(default=False, metadata={"option": False})

  @property
  def ragged(self) -> bool:
    """True if heads share their budget."""
    return self.joint

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """The share of the middle, the same for all layers."""
    kept = [self._kept(budget, int(n)) for n in lengths]
    return in_all_layers(kept, sizes)

  def totals(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Number of tokens that all heads of a row keep together."""
    upper = super().totals(budget, lengths, sizes)
    if not self.joint or not isinstance(budget, Retention) or budget.share == 1:
      return upper
    middle = np.maximum(lengths - self.ends, 0)
    nearest = [
      [budget.nearest(h * int(n)) for n in middle] for h in sizes.heads
    ]
    heads = np.array(sizes.heads)[:, None]
    # Every head keeps the ends; at least a token, as in `counts`.
    least = heads * np.clip(lengths, 1, max(self.ends, 1))
    return np.minimum(np.maximum(np.array(nearest), least), upper)

  def capacities(
    self, budget: Budget, padded: int, sizes: Sizes
  ) -> Int[np.ndarray, " L"]:
    """Number of tokens that the longest row keeps."""
    return np.full(sizes.layers, self._kept(budget, padded), np.int32)

  def _kept(self, budget: Budget, length: int) -> int:
    full = not isinstance(budget, Retention) or budget.share == 1
    if not self.ends or full:
      return budget.num_kept(length)
    return min(
      length, max(self.ends, budget.num_kept(max(length - self.ends, 0)))
    )
