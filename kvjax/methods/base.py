"""The base classes of eviction methods."""

import abc
import dataclasses
from typing import Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation, Uniform
from kvjax.allocation.base import LayerBudget as LayerBudget
from kvjax.cache.layers import LayerCache
from kvjax.cache.observation import ObservationWindow
from kvjax.errors import InputError
from kvjax.labels import name_of
from kvjax.methods.traits import Traits
from kvjax.model import Geometry
from kvjax.options.bounds import check_options
from kvjax.selection import finite, last_tokens, top_slots


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
  """Decides which tokens of a layer's cache are kept.

  A method is a hashable value: its fields are its hyperparameters. It is given
  the cache, which already contains the new block, and the block's activations.
  Its scores are computed once, however many budgets there are.
  """

  def __post_init__(self) -> None:
    check_options(self)

  @property
  def traits(self) -> Traits:
    """What the method requires and does not support; by default nothing."""
    return Traits()

  @property
  def allocation(self) -> Allocation:
    """Default allocation of its budget, which a plan may replace."""
    return Uniform()

  @property
  def votes(self) -> "ScoringMethod | None":
    """Method whose scores heads compete by for a budget; None for no scores."""
    return None

  @final
  @property
  def ranks_slots(self) -> bool:
    """Whether the scores that heads may compete by also select their slots."""
    return self.votes is self

  def check_model(self, geometry: Geometry) -> None:
    """Refuses a model that the method's files are not for; by default none.

    Raises:
      InputError: they are of other layers or heads.
    """
    del geometry

  def check_activations(self, activations: Activations) -> None:
    """Refuses a layer that the method's files are not for; by default none.

    It is called where layers are evaluated or observed.

    Raises:
      InputError: they are for other sizes.
    """
    del activations

  def load(self) -> PyTree:
    """Returns the arrays of the method's files; by default there are none.

    The engine copies them to its devices, and gives them to `evaluate`, which
    gets them by `weights_of`. Arrays that it read itself would be constants of
    every compiled program. It is called for every prefill, and for every answer
    if the method evicts meanwhile, so files should be read once.
    """
    return None

  @final
  def weights_of(self, activations: Activations) -> PyTree[Array]:
    """Returns what `load` does, as arguments of the program if it has them."""
    if activations.weights is not None:
      return activations.weights
    return jax.tree.map(jnp.asarray, self.load())

  def without_files(self) -> Self:
    """Returns the method without the names of files that `load` reads.

    Programs that compress whole prompts know a method by this, so that methods
    which differ in nothing but their files share them. By default, it is the
    method itself.
    """
    return self

  @final
  @property
  def named_files(self) -> tuple[str, ...]:
    """Paths in its own options, those which `without_files` leaves out."""
    bare = self.without_files()
    names = [field.name for field in dataclasses.fields(self)]
    given = [(getattr(self, name), getattr(bare, name)) for name in names]
    return tuple(
      path for path, left in given if isinstance(path, str) and path != left
    )

  def observe(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> LayerCache:
    """Stores in the cache what later selections need of a block."""
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
    """Computes what the selection depends on, for all budgets."""

  def join(
    self, scores: PyTree[Array], cache: LayerCache, budget: LayerBudget
  ) -> PyTree[Array]:
    """Joins the scores of all layers, if the traits say so; by default, means.

    From the result, `select` selects for all layers. What it makes of a single
    layer must select what the scores of that layer do.

    Args:
      scores: results of `evaluate`, each array with a leading axis of the
        layers that the method compresses, in any order.
      cache: the candidates in one of these layers, of which all have the same.
      budget: how many slots to keep.
    """
    del cache, budget
    joined: PyTree[Array] = jax.tree.map(lambda x: jnp.mean(x, axis=0), scores)
    return joined

  @abc.abstractmethod
  def select(
    self, scores: PyTree[Array], cache: LayerCache, budget: LayerBudget
  ) -> Int[Array, "B K M"]:
    """Selects the slots to keep, ascending, then -1.

    Args:
      scores: result of `evaluate`, or of `join`.
      cache: the candidates.
      budget: how many slots to keep.
    """

  def token_scores(
    self, scores: PyTree[Array], cache: LayerCache
  ) -> Float[Array, "B K T"] | None:
    """Returns the score of each slot, from which a calibration may learn.

    Slots that are not scored have -inf; empty slots may have any value. None,
    the default, means that the method does not score tokens.

    Args:
      scores: result of `evaluate`.
      cache: the candidates.
    """
    del scores, cache
    return None


@dataclasses.dataclass(frozen=True)
class ScoringMethod(Method):
  """A method that keeps the slots with the highest scores.

  Implement `scores`, or `HeadwiseMethod.score_head` if heads are scored one by
  one. Override `traits` for what the method reads besides queries, keys and
  values, always keeps, or does not support, and `protected` where what is
  always kept depends on the budget. Budgets, empty slots and the tokens that a
  prompt protects are taken care of.
  """

  @abc.abstractmethod
  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes a float32 score per slot; those of empty slots are ignored."""

  def protected(
    self, cache: LayerCache, counts: Int[Array, " B #K"]
  ) -> Bool[Array, "B K T"]:
    """Slots that are kept whatever their score.

    By default, those of the first and last tokens that the traits name.

    Args:
      cache: the candidates.
      counts: tokens that each head may keep.
    """
    del counts
    sinks = cache.valid & (cache.positions < self.traits.sinks)
    return sinks | last_tokens(cache.valid, self.traits.protects)

  @property
  def votes(self) -> "ScoringMethod":
    """The method itself."""
    return self

  @final
  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes the scores.

    Raises:
      InputError: they are not one number in float32 for every slot.
    """
    scores = self.scores(layer, cache, activations)
    shape, given = cache.positions.shape, type(scores).__name__
    if isinstance(scores, jax.Array | np.ndarray):
      given = f"{scores.dtype} {scores.shape}"
    if given != f"float32 {shape}":
      raise InputError(
        f"{name_of(self)} must give every slot a score in float32, {shape} of "
        f"them here, whatever the cache's dtype; it gives {given}."
      )
    return scores

  def as_weights(self, scores: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
    """Scores on the scale of one query's attention, if they are attention."""
    return scores

  def group_scores(
    self, scores: Float[Array, "B K T"], cache: LayerCache, budget: LayerBudget
  ) -> Float[Array, "B K T"]:
    """The scores; protected slots have the highest of the row and 1 more.

    This is how kvpress's scorers protect tokens. It is for methods that rank
    groups of tokens by these scores, such as `WholeChunks`.
    """
    scores = finite(self.as_weights(scores))
    protected = self.protected(cache, budget.per_head)
    free = cache.valid & ~protected
    highest = jnp.max(
      scores, axis=(1, 2), keepdims=True, initial=-jnp.inf, where=free
    )
    # -inf where every slot is protected, and so would be -inf + 1.
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    return jnp.where(protected, highest + 1.0, scores)

  @final
  def token_scores(
    self, scores: Float[Array, "B K T"], cache: LayerCache
  ) -> Float[Array, "B K T"]:
    """Returns the scores."""
    del cache
    return scores

  @final
  def select(
    self, scores: Float[Array, "B K T"], cache: LayerCache, budget: LayerBudget
  ) -> Int[Array, "B K M"]:
    """Selects the protected slots and the highest scores."""
    return top_slots(
      scores,
      cache.valid,
      self.protected(cache, budget.per_head),
      budget.counts,
      budget.capacity,
      budget.must_keep(cache),
    )
