"""PyramidKV: lower layers keep more, higher layers less."""

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Array, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.methods.base import Allowance, Method
from kvjax.methods.snapkv import SnapKV
from kvjax.options.bounds import check_least
from kvjax.options.budgets import Budget, Tokens
from kvjax.prompts import bucket_lengths


@dataclasses.dataclass(frozen=True)
class Pyramid(Method):
  """Spreads the budget of another method over the layers as a pyramid.

  With W protected by the other method's window and base = B - W, the lowest
  layer keeps max = 2 base - base / beta, the highest base / beta, those
  between by a straight line, and each its window besides; no layer keeps more
  than the prompt. What rounding leaves over goes to the lowest layers, so that
  the layers together keep exactly B tokens per layer.

  A retention r means base = r n, and a layer's value includes its window; where
  it then could not hold the window, all layers keep the same. In both forms max
  is at most n - W, and what it lacks goes to the highest layer.

  Source: Cai et al., arXiv 2406.02069; the retention form follows kvpress.

  Attributes:
    inner: the method that chooses the tokens; SnapKV as in the authors' code.
    beta: how steep the pyramid is.
  """

  whole_prompts_only: ClassVar[str] = (
    "it shares out the budget once, when the prompt is known"
  )

  inner: Method = SnapKV(window=8, kernel=7, pooling="max")
  beta: float = 20.0

  def __post_init__(self) -> None:
    super().__post_init__()
    self.inner.check_spread()
    check_least(self, beta=1)

  @property
  def why_even(self) -> str:
    """Layers come first."""
    return "its layers have their shares; write pyramid/ada/NAME for both"

  @property
  def packed(self) -> bool:
    """As the inner method."""
    return self.inner.packed

  def source_layer(self, layer: int) -> int:
    """As the inner method."""
    return self.inner.source_layer(layer)

  def layer_kept(
    self, budget: Budget, length: int, layers: int
  ) -> tuple[int, ...]:
    """Tokens that a row of `length` tokens keeps in each layer."""
    return _ints(self._counts(budget, np.array([length]), layers)[:, 0])

  def layer_capacities(
    self, budget: Budget, padded: int, layers: int
  ) -> tuple[int, ...]:
    """Most tokens that a row of the bucket keeps in each layer."""
    lengths = np.array(bucket_lengths(padded))
    return _ints(self._counts(budget, lengths, layers).max(axis=1))

  def evaluate(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> PyTree[Array]:
    """As the inner method."""
    return self.inner.evaluate(layer, cache, seen)

  def select(
    self, found: PyTree[Array], cache: LayerCache, allowance: Allowance
  ) -> Int[Array, "B K M"]:
    """As the inner method, with this layer's share."""
    return self.inner.select(found, cache, allowance)

  def _counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], layers: int
  ) -> Int[np.ndarray, "L n"]:
    window = getattr(self.inner, "window", 0)
    total = np.array([self.inner.kept(budget, int(n)) for n in lengths])
    # In tokens, the window comes on top of each layer's share of the prefix.
    beside, within = (window, 0) if isinstance(budget, Tokens) else (0, window)
    base = total - beside
    most = np.minimum(2 * base - base / self.beta, lengths - window)
    least = 2 * base - most
    step = (most - least) / max(layers - 1, 1)
    depth = np.arange(layers)[:, None]
    line = np.rint(most - depth * step).astype(int)
    # Rounding moves each layer by at most a half: a token each mends it.
    left = layers * base - line.sum(axis=0)
    roomy = (line + beside < lengths) | (left < 0)
    place = np.cumsum(roomy, axis=0) - 1
    line += (roomy & (place < np.abs(left))) * np.sign(left)
    # Above n - W on average there is nothing to spread.
    uneven = (total < lengths) & (base > 0) & (layers > 1)
    uneven &= (least >= within) & (most >= least)
    return np.where(uneven, line + beside, total)


def _ints(counts: Int[np.ndarray, " L"]) -> tuple[int, ...]:
  return tuple(int(count) for count in counts)
