"""Methods that change what happens to the tokens that another one selects."""

import dataclasses

from jaxtyping import Array, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.methods.base import Allocation, LayerBudget, Method
from kvjax.model import Geometry


@dataclasses.dataclass(frozen=True)
class Around(Method):
  """Selects what another method selects.

  Attributes:
    over: the method that selects.
  """

  over: Method

  @property
  def allocation(self) -> Allocation:
    """The method's allocation."""
    return self.over.allocation

  def check_model(self, geometry: Geometry) -> None:
    """Refuses what the method refuses."""
    self.over.check_model(geometry)

  def observe(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> LayerCache:
    """Stores what the method needs of a block."""
    return self.over.observe(layer, cache, activations)

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> PyTree[Array]:
    """Computes what the method's selection depends on."""
    return self.over.evaluate(layer, cache, activations)

  def select(
    self, scores: PyTree[Array], cache: LayerCache, budget: LayerBudget
  ) -> Int[Array, "B K M"]:
    """Selects what the method selects."""
    return self.over.select(scores, cache, budget)
