"""Methods that use another method."""

import dataclasses
from typing import Self

from jaxtyping import Array, Int, PyTree

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.labels import name_of
from kvjax.methods.base import LayerBudget, Method
from kvjax.methods.traits import Traits
from kvjax.model import Geometry


@dataclasses.dataclass(frozen=True)
class Using(Method):
  """A method that uses another one, with its files.

  Attributes:
    over: the other method.
  """

  over: Method

  def __post_init__(self) -> None:
    super().__post_init__()
    if not isinstance(self.over, Method):
      raise InputError(
        f"{type(self).__name__} uses a kvjax.methods.Method, such as "
        f"kvjax.get_method('keydiff'); {self.over!r} is not one."
      )

  def check_model(self, geometry: Geometry) -> None:
    """Refuses the models that the other method refuses.

    Raises:
      InputError: it does.
    """
    self.over.check_model(geometry)

  def check_activations(self, activations: Activations) -> None:
    """Refuses the layers that the other method refuses.

    Raises:
      InputError: it does.
    """
    self.over.check_activations(activations)

  def load(self) -> PyTree:
    """Returns the method's arrays."""
    return self.over.load()

  def without_files(self) -> Self:
    """Uses the method without the names of its files."""
    return dataclasses.replace(self, over=self.over.without_files())

  def join(
    self, scores: PyTree[Array], cache: LayerCache, budget: LayerBudget
  ) -> PyTree[Array]:
    """Joins the scores of all layers as the method does."""
    return self.over.join(scores, cache, budget)


def refuse_joined(prefix: str, over: Method) -> None:
  """Refuses a method that selects for all layers, where each has its own part.

  Args:
    prefix: what users write before the name of the method.
    over: the method.

  Raises:
    InputError: it joins the scores of all layers.
  """
  if over.traits.joins_layers:
    raise InputError(
      f"{prefix} selects in each layer by itself, and with these options "
      f"{name_of(over)} once for all layers; choose others, or use it without "
      f"{prefix}."
    )


@dataclasses.dataclass(frozen=True)
class Around(Using):
  """Selects what another method selects, to which something else happens.

  By default nothing: a subclass overrides what it changes.
  """

  @property
  def traits(self) -> Traits:
    """The method's traits."""
    return self.over.traits

  @property
  def allocation(self) -> Allocation:
    """The method's allocation."""
    return self.over.allocation

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
