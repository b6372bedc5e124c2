"""What every eviction method is made of."""

import abc
import dataclasses
from typing import ClassVar, final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.cache.observation import ObservationWindow
from kvjax.errors import InputError
from kvjax.methods.selection import top_slots
from kvjax.options.bounds import check_choices
from kvjax.options.budgets import Budget
from kvjax.struct import static, struct


@struct
class Allowance:
  """What a layer may keep.

  Attributes:
    counts: tokens per row and KV head, the same for all heads or for each.
    capacity: M, slots of the new cache; at least every count.
    whole: no row has to lose anything.
    budget: what every eviction may keep, where there are many: the counts are
      those of the whole row.
    together: tokens that all heads of a row keep together, for methods that
      share them out; None for as many as their counts are.
    protected: by position, tokens that the user protects, if there are any.
  """

  counts: Int[Array, " B"] | Int[Array, "B K"]
  capacity: int = static()
  whole: bool = static(default=False)
  budget: Budget | None = static(default=None)
  together: Int[Array, " B"] | None = None
  protected: Bool[Array, "B P"] | None = None

  @property
  def per_head(self) -> Int[Array, "B #K"]:
    """The counts with an axis for the heads."""
    return self.counts.reshape(self.counts.shape[0], -1)

  def must_keep(self, cache: LayerCache) -> Bool[Array, "B K T"]:
    """Slots of the tokens that the user protects."""
    places = cache.positions
    if self.protected is None:
      return jnp.zeros(places.shape, bool)
    batch, width = self.protected.shape
    mask = jnp.broadcast_to(
      self.protected[:, None], (batch, places.shape[1], width)
    )
    found = jnp.take_along_axis(mask, jnp.clip(places, 0, width - 1), axis=-1)
    return found & (places >= 0) & (places < width)


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
  """Decides which tokens of a layer's cache are kept.

  A method is a hashable value: its fields are its hyper-parameters. It sees
  the cache with the new block already in it, and what the block's attention
  saw. What it finds there is computed once, whatever the number of budgets.
  """

  def __post_init__(self) -> None:
    check_choices(self)

  # Why the method is defined for whole prompts only; empty if it is not.
  whole_prompts_only: ClassVar[str] = ""

  def check_schedule(self, budget: Budget) -> None:
    """Refuses to work block by block or while decoding, if so be.

    Raises:
      InputError: the method is not defined for that, or not with this budget.
    """
    del budget
    if self.whole_prompts_only:
      raise InputError(
        f"{type(self).__name__} cannot evict block by block or while decoding: "
        f"{self.whole_prompts_only}."
      )

  @property
  def why_even(self) -> str:
    """Why layers and heads must get equal shares; empty if they need not."""
    return ""

  @final
  def check_spread(self) -> None:
    """Refuses that layers or heads get unequal shares of the budget, if so be.

    Raises:
      InputError: see `why_even`.
    """
    if self.why_even:
      raise InputError(
        f"The budget of {type(self).__name__} cannot be spread unevenly over "
        f"layers or heads: {self.why_even}."
      )

  def check_protected(
    self,
    protected: Bool[np.ndarray, " n"],
    budget: Budget,
    layers: int,
  ) -> None:
    """Refuses to protect more tokens of a row than it keeps.

    Args:
      protected: for each token of the row.
      budget: what the row may keep.
      layers: L.

    Raises:
      InputError: they are too many.
    """
    most = min(self.layer_kept(budget, len(protected), layers))
    if protected.sum() > most:
      raise InputError(
        f"{protected.sum()} tokens of a prompt are protected and {most} may be "
        "kept; protect fewer or give a larger budget."
      )

  @property
  def observation_window(self) -> int:
    """Queries to remember from one block to the next."""
    return 0

  def observe(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> LayerCache:
    """Remembers of a block, which is in the cache, what later choices need."""
    del layer
    width = self.observation_window
    if not width:
      return cache
    window = cache.window or ObservationWindow.empty(seen, width)
    return dataclasses.replace(cache, window=window.after(seen))

  def keeps_all(self, layer: int) -> bool:
    """True where this layer's cache is never compressed."""
    del layer
    return False

  def kept(self, budget: Budget, length: int) -> int:
    """Tokens that a row of `length` tokens keeps."""
    return budget.kept(length)

  def capacity(self, budget: Budget, padded: int) -> int:
    """Most tokens that a row of the bucket of `padded` tokens keeps."""
    return budget.kept(padded)

  @property
  def rerotates(self) -> bool:
    """Whether what is kept is renumbered by its order (`rerotation`)."""
    return False

  @property
  def packed(self) -> bool:
    """Whether heads of a layer may keep different numbers (`PackedLayer`)."""
    return False

  def due(self, cache: LayerCache, allowance: Allowance) -> Bool[Array, ""]:
    """Whether any row holds more than it may."""
    return jnp.any(cache.lengths > allowance.per_head)

  def source_layer(self, layer: int) -> int:
    """The layer, this one or one before, whose choice this layer copies."""
    return layer

  def lasting_capacity(self, budget: Budget, padded: int) -> int:
    """Most tokens held between evictions by any row of up to `padded`."""
    return self.capacity(budget, padded)

  def layer_kept(
    self, budget: Budget, length: int, layers: int
  ) -> tuple[int, ...]:
    """Tokens that a row keeps in each layer; here in all the same."""
    return (self.kept(budget, length),) * layers

  def layer_together(
    self, budget: Budget, length: int, layers: int, heads: int
  ) -> tuple[int, ...]:
    """Tokens that all heads of a row keep together in each layer."""
    return tuple(heads * n for n in self.layer_kept(budget, length, layers))

  def layer_capacities(
    self, budget: Budget, padded: int, layers: int
  ) -> tuple[int, ...]:
    """Most tokens that a row of the bucket keeps in each layer."""
    return (self.capacity(budget, padded),) * layers

  @abc.abstractmethod
  def evaluate(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> PyTree[Array]:
    """What the choice depends on, for every budget alike."""

  @abc.abstractmethod
  def select(
    self, found: PyTree[Array], cache: LayerCache, allowance: Allowance
  ) -> Int[Array, "B K M"]:
    """Slots to keep, ascending, then -1.

    Args:
      found: what `evaluate` answered.
      cache: the candidates.
      allowance: how many.
    """


@dataclasses.dataclass(frozen=True)
class ScoringMethod(Method):
  """A method that keeps the slots of the highest scores."""

  @abc.abstractmethod
  def scores(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> Float[Array, "B K T"]:
    """Float32 worth of every slot; what empty slots get has no effect."""

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

  @final
  def evaluate(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> Float[Array, "B K T"]:
    """The scores."""
    return self.scores(layer, cache, seen)

  @final
  def select(
    self, found: Float[Array, "B K T"], cache: LayerCache, allowance: Allowance
  ) -> Int[Array, "B K M"]:
    """The highest scores beside the protected slots."""
    return top_slots(
      found,
      cache.held,
      self.protected(cache, allowance.per_head),
      allowance.counts,
      allowance.capacity,
      allowance.must_keep(cache),
    )
