"""The allocation of a threshold: as many tokens as reach it."""

import dataclasses

import numpy as np
from jaxtyping import Int

from kvjax.allocation.base import Allocation, Sizes, in_all_layers
from kvjax.options.budgets import Budget


@dataclasses.dataclass(frozen=True)
class ByThreshold(Allocation):
  """Lets every head keep what reaches a threshold.

  Only a plan whose budget is a `Threshold` has it. The counts, which are known
  once all layers are scored, are at most these.
  """

  ragged = True
  spreads_layers = True

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """All tokens of each row."""
    del budget
    return in_all_layers(lengths, sizes)
