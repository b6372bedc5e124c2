"""PyramidKV as kvpress counts it."""

import dataclasses

import numpy as np
from jaxtyping import Int

from kvjax.allocation.base import Sizes
from kvjax.allocation.pyramid import Pyramid
from kvjax.options.budgets import Budget, Retention


@dataclasses.dataclass(frozen=True)
class RoundedPyramid(Pyramid):
  """Spreads a retention over the layers and rounds each layer by itself.

  It is the retention form of `Pyramid`, to the token and in the floating point
  of kvpress: each layer's number is rounded to nearest, halves to even, and so
  is r n where all layers keep the same, but at least 1. The mean then differs
  from the budget by up to half a token. A budget of B tokens counts as the
  retention B / n. Its attributes are those of `Pyramid`.

  Source: kvpress's PyramidKVPress, after Cai et al., arXiv 2406.02069.
  """

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Number of tokens that rows of these lengths keep in each layer."""
    rows = [self._row(budget, int(n), sizes) for n in lengths]
    return np.array(rows, np.int32).T

  def _row(self, budget: Budget, length: int, sizes: Sizes) -> list[int]:
    layers, window = sizes.layers, sizes.protects
    mean: float
    if isinstance(budget, Retention):
      # kvpress is given the share to remove, which rounds differently from r.
      mean = length * (1 - (1 - budget.share))
    else:
      mean = budget.num_kept(length)
    # kvpress adds the window and takes it away again, which rounds.
    base = window + mean - window
    top = base / self.beta
    bottom = base * 2 - top
    if bottom >= length - window:
      bottom = length - window
      top = base * 2 - bottom
    # A single layer has no other to take from; kvpress divides by zero there.
    if layers < 2 or not length >= bottom >= top >= window:
      return [max(1, round(mean))] * layers
    step = (bottom - top) / (layers - 1)
    return [max(1, round(bottom - layer * step)) for layer in range(layers)]
