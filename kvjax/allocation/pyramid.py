"""PyramidKV: lower layers keep more, higher layers less."""

import dataclasses

import numpy as np
from jaxtyping import Array, Int, PyTree

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation, Chooser, LayerBudget, Sizes
from kvjax.cache.layers import LayerCache
from kvjax.options.bounds import check_least
from kvjax.options.budgets import Budget, Tokens


@dataclasses.dataclass(frozen=True)
class Pyramid(Allocation):
  """Spreads a budget over the layers as a pyramid.

  With W protected by the method's window and base = B - W, the lowest layer
  keeps max = 2 base - base / beta, the highest base / beta, those between by a
  straight line, and each its window besides; no layer keeps more than the
  prompt. What rounding leaves over goes to the lowest layers, so that the
  layers together keep exactly B tokens per layer.

  A retention r means base = r n, and a layer's value includes its window; where
  it then could not hold the window, all layers keep the same. In both forms max
  is at most n - W, and what it lacks goes to the highest layer.

  Source: Cai et al., arXiv 2406.02069; the retention form follows kvpress.

  Attributes:
    over: what the layers keep on average.
    window: W, last tokens that the method always keeps; no option, as the
      method's traits say it.
    beta: how steep the pyramid is.
  """

  over: Allocation
  window: int = dataclasses.field(default=0, metadata={"option": False})
  beta: float = 20.0

  def __post_init__(self) -> None:
    check_least(self, beta=1)

  @property
  def ragged(self) -> bool:
    """As what is spread."""
    return self.over.ragged

  @property
  def votes(self) -> bool:
    """As what is spread."""
    return self.over.votes

  def evaluate(
    self,
    method: Chooser,
    layer: Int[Array, ""],
    cache: LayerCache,
    activations: Activations,
  ) -> PyTree[Array]:
    """As what is spread."""
    return self.over.evaluate(method, layer, cache, activations)

  def select(
    self,
    method: Chooser,
    scores: PyTree[Array],
    cache: LayerCache,
    budget: LayerBudget,
  ) -> Int[Array, "B K M"]:
    """As what is spread, with this layer's share."""
    return self.over.select(method, scores, cache, budget)

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Tokens that rows of these lengths keep in each layer."""
    total = self.over.counts(budget, lengths, sizes)[0]
    # In tokens, the window comes on top of each layer's share of the prefix.
    beside, within = (
      (self.window, 0) if isinstance(budget, Tokens) else (0, self.window)
    )
    base = total - beside
    most = np.minimum(2 * base - base / self.beta, lengths - self.window)
    least = 2 * base - most
    step = (most - least) / max(sizes.layers - 1, 1)
    depth = np.arange(sizes.layers)[:, None]
    line = np.rint(most - depth * step).astype(int)
    # Rounding moves each layer by at most a half: a token each mends it.
    left = sizes.layers * base - line.sum(axis=0)
    roomy = (line + beside < lengths) | (left < 0)
    place = np.cumsum(roomy, axis=0) - 1
    line += (roomy & (place < np.abs(left))) * np.sign(left)
    # Above n - W on average there is nothing to spread.
    uneven = (total < lengths) & (base > 0) & (sizes.layers > 1)
    uneven &= (least >= within) & (most >= least)
    return np.where(uneven, line + beside, total).astype(np.int32)
