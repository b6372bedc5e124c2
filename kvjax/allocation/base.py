"""How many tokens each layer and head may keep."""

import abc
import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.options.budgets import Budget
from kvjax.prompts import bucket_lengths
from kvjax.struct import static, struct


@runtime_checkable
class Chooser(Protocol):
  """What an allocation asks of a method; see `kvjax.methods.Method`."""

  @property
  def votes(self) -> Any:
    """What heads compete by where they share a budget; None if they cannot."""
    ...

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> PyTree[Array]:
    """What the choice depends on, for every budget alike."""
    ...

  def select(
    self, scores: PyTree[Array], cache: LayerCache, budget: "LayerBudget"
  ) -> Int[Array, "B K M"]:
    """Slots to keep, ascending, then -1."""
    ...


class Sizes(NamedTuple):
  """What a budget is spread over.

  Attributes:
    heads: of each layer that methods compress, the heads that hold keys and
      values.
  """

  heads: tuple[int, ...]

  @property
  def layers(self) -> int:
    """How many layers there are."""
    return len(self.heads)


@struct
class LayerBudget:
  """What the rows of a batch may keep of a layer.

  Attributes:
    counts: tokens per row and KV head, the same for all heads or for each.
    capacity: M, slots of the new cache; at least every count.
    budget: what every eviction may keep, where there are many: the counts are
      those of the whole row.
    total: tokens that all heads of a row keep together, where they share them
      out; None for as many as their counts are.
    protected: by position, tokens that the user protects, if there are any.
  """

  counts: Int[Array, " B"] | Int[Array, "B K"]
  capacity: int = static()
  budget: Budget | None = static(default=None)
  total: Int[Array, " B"] | None = None
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
class Allocation(abc.ABC):
  """Spreads a budget over layers and heads.

  An allocation is a hashable value; what it counts depends on budget and
  lengths alone and is computed on the host, before anything is compiled.
  """

  @property
  def ragged(self) -> bool:
    """Whether the heads of a layer may keep different numbers."""
    return False

  @property
  def votes(self) -> bool:
    """Whether heads share out a layer's budget by what `Method.votes` says."""
    return False

  @abc.abstractmethod
  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Tokens that rows of these lengths keep per head in each layer.

    Where heads share out what a layer keeps, this is their mean, rounded up.
    """

  def totals(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Tokens that all heads of a row keep together in each layer."""
    heads = np.array(sizes.heads, np.int32)[:, None]
    return heads * self.counts(budget, lengths, sizes)

  def capacities(
    self, budget: Budget, padded: int, sizes: Sizes
  ) -> Int[np.ndarray, " L"]:
    """Most tokens per head that a row of the bucket keeps in each layer."""
    lengths = np.array(bucket_lengths(padded))
    return self.counts(budget, lengths, sizes).max(axis=1)

  def capacity_between(self, budget: Budget, padded: int) -> int:
    """Most tokens that a row of up to `padded` holds between evictions."""
    return budget.kept(padded)

  def evaluate(
    self,
    method: Chooser,
    layer: Int[Array, ""],
    cache: LayerCache,
    activations: Activations,
  ) -> PyTree[Array]:
    """What the choice of a layer's slots depends on, for every budget alike."""
    return method.evaluate(layer, cache, activations)

  def select(
    self,
    method: Chooser,
    scores: PyTree[Array],
    cache: LayerCache,
    budget: LayerBudget,
  ) -> Int[Array, "B K M"]:
    """Slots to keep, by what `evaluate` has found."""
    return method.select(scores, cache, budget)

  def is_due(self, cache: LayerCache, budget: LayerBudget) -> Bool[Array, ""]:
    """Whether any row holds more than it may."""
    return jnp.any(cache.lengths > budget.per_head)

  def check_recursive(self, budget: Budget) -> None:
    """Refuses a budget that cannot be kept in blocks or while decoding.

    Raises:
      InputError: there is no such law for it.
    """
    del budget

  def check_protected(
    self, protected: Bool[np.ndarray, " n"], budget: Budget, sizes: Sizes
  ) -> None:
    """Refuses to protect more tokens of a row than it keeps.

    Args:
      protected: for each token of the row.
      budget: what the row may keep.
      sizes: what it is spread over.

    Raises:
      InputError: they are too many.
    """
    lengths = np.array([len(protected)])
    most = int(self.counts(budget, lengths, sizes).min())
    if protected.sum() > most:
      raise InputError(
        f"{protected.sum()} tokens of a prompt are protected and {most} may be "
        "kept; protect fewer or give a larger budget."
      )


@dataclasses.dataclass(frozen=True)
class Uniform(Allocation):
  """Every layer and head keeps the budget."""

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """The budget of each row, for all layers alike."""
    kept = [budget.kept(int(n)) for n in lengths]
    return np.tile(np.array(kept, np.int32), (sizes.layers, 1))

  def capacities(
    self, budget: Budget, padded: int, sizes: Sizes
  ) -> Int[np.ndarray, " L"]:
    """The budget of the longest row."""
    return np.full(sizes.layers, budget.kept(padded), np.int32)
