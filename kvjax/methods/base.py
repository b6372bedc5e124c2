"""What every eviction method is made of."""

import abc
import dataclasses
from typing import final

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation as Allocation
from kvjax.allocation.base import LayerBudget as LayerBudget
from kvjax.allocation.base import Uniform
from kvjax.cache.layers import LayerCache
from kvjax.cache.observation import ObservationWindow
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_choices
from kvjax.selection import top_slots


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
  """Decides which tokens of a layer's cache are kept.

  A method is a hashable value: its fields are its hyper-parameters. It sees
  the cache with the new block already in it, and the block's activations. What
  it finds there is computed once, whatever the number of budgets.
  """

  def __post_init__(self) -> None:
    check_choices(self)

  @property
  def traits(self) -> Traits:
    """What the method needs and refuses; by default nothing."""
    return Traits()

  @property
  def allocation(self) -> Allocation:
    """How many tokens it keeps of a budget; a plan may say otherwise."""
    return Uniform()

  @property
  def votes(self) -> "ScoringMethod | None":
    """What heads compete by where they share a budget; None if they cannot."""
    return None

  def observe(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> LayerCache:
    """Remembers of a block, which is in the cache, what later choices need."""
    del layer
    width = self.traits.window
    if not width:
      return cache
    window = cache.window or ObservationWindow.empty(activations, width)
    return dataclasses.replace(cache, window=window.append(activations))

  @abc.abstractmethod
  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> PyTree[Array]:
    """What the choice depends on, for every budget alike."""

  @abc.abstractmethod
  def select(
    self, scores: PyTree[Array], cache: LayerCache, budget: LayerBudget
  ) -> Int[Array, "B K M"]:
    """Slots to keep, ascending, then -1.

    Args:
      scores: what `evaluate` returned.
      cache: the candidates.
      budget: how many to keep.
    """


@dataclasses.dataclass(frozen=True)
class ScoringMethod(Method):
  """A method that keeps the slots of the highest scores."""

  @abc.abstractmethod
  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Float32 score of every slot; what empty slots get has no effect."""

  def protected(
    self, cache: LayerCache, counts: Int[Array, "B #K"]
  ) -> Bool[Array, "B K T"]:
    """Slots that stay whatever their score.

    Args:
      cache: the candidates.
      counts: tokens that each head may keep.
    """
    del counts
    return jnp.zeros(cache.positions.shape, bool)

  @property
  def votes(self) -> "ScoringMethod":
    """Its own scores."""
    return self

  @final
  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """The scores."""
    return self.scores(layer, cache, activations)

  @final
  def select(
    self, scores: Float[Array, "B K T"], cache: LayerCache, budget: LayerBudget
  ) -> Int[Array, "B K M"]:
    """The highest scores beside the protected slots."""
    return top_slots(
      scores,
      cache.valid,
      self.protected(cache, budget.per_head),
      budget.counts,
      budget.capacity,
      budget.must_keep(cache),
    )
