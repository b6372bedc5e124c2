"""PyramidKV: lower layers keep more tokens, higher layers fewer."""

import dataclasses

import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.allocation.base import (
  Allocation,
  Chooser,
  LayerBudget,
  Sizes,
  overrides,
)
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.options.bounds import check_least
from kvjax.options.budgets import Budget, Tokens


@dataclasses.dataclass(frozen=True)
class Pyramid(Allocation):
  """Spreads a budget over the layers as a pyramid.

  W is the number of last tokens that the method always keeps, its window, and
  base = B - W. The lowest layer keeps max = 2 base - base / beta tokens, the
  highest base / beta, and the numbers in between are on a straight line. Each
  layer also keeps its window, and no layer keeps more than the prompt. Tokens
  that rounding leaves over go to the lowest layers, so that the mean over the
  layers is exactly B.

  A retention r means base = r n, and a layer's number includes its window. If a
  layer could then not keep the window, or kept nothing in either form, all
  layers keep the same number. In both forms max is at most n - W, and the
  difference goes to the highest layer.

  Source: Cai et al., arXiv 2406.02069; the retention form follows kvpress.

  Attributes:
    over: allocation that gives the mean over the layers.
    beta: steepness of the pyramid.
  """

  spreads_layers = True

  over: Allocation
  beta: float = 20.0

  def __post_init__(self) -> None:
    check_least(self, beta=1)
    if self.over.spreads_layers:
      raise InputError(
        f"{type(self.over).__name__} gives layers unequal shares already; give "
        f"{type(self).__name__} one whose layers keep equally many tokens."
      )

  @property
  def ragged(self) -> bool:
    """Whether the inner allocation is ragged."""
    return self.over.ragged

  @property
  def votes(self) -> bool:
    """Whether heads compete in the inner allocation."""
    return self.over.votes

  @property
  def ranks_slots(self) -> bool:
    """Whether those heads select by the scores that they compete by."""
    return self.over.ranks_slots

  @property
  def selector(self) -> Allocation:
    """The selector of the inner allocation: shares change counts only."""
    return self if overrides(self, Pyramid) else self.over.selector

  def evaluate(
    self,
    method: Chooser,
    layer: Int[Array, ""],
    cache: LayerCache,
    activations: Activations,
  ) -> PyTree[Array]:
    """Evaluates by the inner allocation."""
    return self.over.evaluate(method, layer, cache, activations)

  def select(
    self,
    method: Chooser,
    scores: PyTree[Array],
    cache: LayerCache,
    budget: LayerBudget,
  ) -> Int[Array, "B K M"]:
    """Selects by the inner allocation, with this layer's share."""
    return self.over.select(method, scores, cache, budget)

  def token_scores(
    self, method: Chooser, scores: PyTree[Array], cache: LayerCache
  ) -> Float[Array, "B K T"] | None:
    """Returns those of the inner allocation."""
    return self.over.token_scores(method, scores, cache)

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Number of tokens that rows of these lengths keep in each layer."""
    totals = self.over.counts(budget, lengths, sizes)
    if not sizes.layers:
      return totals
    total, window = totals[0], sizes.protects
    # With a budget in tokens, a layer's share does not include the window.
    outside, inside = (window, 0) if isinstance(budget, Tokens) else (0, window)
    base = total - outside
    # Layer 0 is the bottom. The ends average `base`, also where the prompt
    # limits the bottom.
    bottom = np.minimum(2 * base - base / self.beta, lengths - window)
    top = 2 * base - bottom
    step = (bottom - top) / max(sizes.layers - 1, 1)
    depth = np.arange(sizes.layers)[:, None]
    shares = np.rint(bottom - depth * step).astype(int)
    # Rounding changes each layer by at most 1/2, so one token each corrects it.
    remaining = sizes.layers * base - shares.sum(axis=0)
    # From layer 0 up; a layer that has the whole prompt already gets no more.
    adjustable = (shares + outside < lengths) | (remaining < 0)
    place = np.cumsum(adjustable, axis=0) - 1
    shares += (adjustable & (place < np.abs(remaining))) * np.sign(remaining)
    # With a mean above n - W there is nothing to spread.
    uneven = (total < lengths) & (base > 0) & (sizes.layers > 1)
    uneven &= (top >= inside) & (bottom >= top) & (shares[-1] + outside > 0)
    return np.where(uneven, shares + outside, total).astype(np.int32)
