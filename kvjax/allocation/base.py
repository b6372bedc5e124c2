"""The interface of allocations, and the uniform one."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.model import Geometry
from kvjax.options.budgets import Budget
from kvjax.prompts import bucket_lengths
from kvjax.struct import static, struct


@runtime_checkable
class Chooser(Protocol):
  """The part of `kvjax.methods.Method` that an allocation uses."""

  @property
  def votes(self) -> "Voter | None":
    """Method whose scores heads compete by for a budget; None for no scores."""
    ...

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> PyTree[Array]:
    """Computes what the selection depends on, for all budgets."""
    ...

  def select(
    self, scores: PyTree[Array], cache: LayerCache, budget: "LayerBudget"
  ) -> Int[Array, "B K M"]:
    """Selects the slots to keep, ascending, then -1."""
    ...

  def token_scores(
    self, scores: PyTree[Array], cache: LayerCache
  ) -> Float[Array, "B K T"] | None:
    """Returns the score of each slot; None if the method does not score."""
    ...


class Voter(Chooser, Protocol):
  """The part of `kvjax.methods.ScoringMethod` by which heads compete."""

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes the score of each slot."""
    ...

  def protected(
    self, cache: LayerCache, counts: Int[Array, " B #K"]
  ) -> Bool[Array, "B K T"]:
    """Slots that are kept whatever their score."""
    ...


class Sizes(NamedTuple):
  """The layers and heads that a budget is spread over, and what they keep.

  Attributes:
    heads: number of heads that store keys and values, for each layer that
      methods compress.
    protects: number of last tokens that the method keeps before others; see
      `kvjax.methods.Traits`.
  """

  heads: tuple[int, ...]
  protects: int = 0

  @property
  def layers(self) -> int:
    """Number of layers."""
    return len(self.heads)


@struct
class LayerBudget:
  """The number of tokens that the rows of a batch keep of a layer.

  Attributes:
    counts: tokens per row, or per row and KV head.
    capacity: M, slots of the new cache; at least what any count keeps of a row.
    budget: the budget of every eviction, if there are several; `counts` are
      those of the whole row then.
    total: tokens that all heads of a row keep together, if they share them;
      None for the sum of their counts.
    protected: by position, tokens that the user protects, if there are any.
    parts: tokens that each head keeps of each of C parts of a row, if the
      allocation counts by parts.
    share: share of its tokens that a row is to keep, before rounding; None for
      that of its counts.
    safe: slots of each head that its best votes have for sure, if the heads
      compete above a floor; part of `counts`.
  """

  counts: Int[Array, " B"] | Int[Array, "B K"]
  capacity: int = static()
  budget: Budget | None = static(default=None)
  total: Int[Array, " B"] | None = None
  protected: Bool[Array, "B P"] | None = None
  parts: Int[Array, "B C"] | None = None
  share: Float[Array, " B"] | None = None
  safe: Int[Array, " B #K"] | None = None

  @property
  def per_head(self) -> Int[Array, " B #K"]:
    """The counts with an axis of heads."""
    return self.counts.reshape(self.counts.shape[0], -1)

  def must_keep(self, cache: LayerCache) -> Bool[Array, "B K T"]:
    """Slots of the tokens that the user protects."""
    positions = cache.positions
    if self.protected is None:
      return jnp.zeros(positions.shape, bool)
    batch, width = self.protected.shape
    mask = jnp.broadcast_to(
      self.protected[:, None], (batch, positions.shape[1], width)
    )
    # By position, as slots change with every eviction. The mask covers the
    # prompt; decoded tokens are beyond it and never protected.
    protected = jnp.take_along_axis(
      mask, jnp.clip(positions, 0, width - 1), axis=-1
    )
    return protected & (positions >= 0) & (positions < width)


@dataclasses.dataclass(frozen=True)
class Allocation(abc.ABC):
  """Spreads a budget over layers and heads.

  An allocation is a hashable value. Its counts depend on the budget and the
  lengths alone and are computed on the host, before compilation. What all
  values of a class declare, such as `ragged = True`, may be an attribute of the
  class in place of a property.
  """

  @property
  def ragged(self) -> bool:
    """Whether the heads of a layer may keep different numbers of tokens."""
    return False

  @property
  def spreads_layers(self) -> bool:
    """Whether layers get different shares of a budget."""
    return False

  @property
  def whole_model(self) -> bool:
    """Whether heads of all layers compete for one budget by their scores."""
    return False

  @property
  def votes(self) -> bool:
    """Whether heads compete for a layer's budget by `Method.votes`."""
    return False

  @property
  def ranks_slots(self) -> bool:
    """Whether the scores by which heads compete also select their slots.

    Its method must score every slot then, as a `ScoringMethod` does.
    """
    return self.whole_model

  @property
  def prescribes(self) -> bool:
    """Whether its method keeps what it says, whatever counts it is given.

    Such a method cannot select for another that counts otherwise, such as
    `chunked/`.
    """
    return False

  @property
  def named_files(self) -> tuple[str, ...]:
    """Paths of files in its own options; by default there are none."""
    return ()

  def can_follow(self, earlier: "Allocation", *, same_budget: bool) -> bool:
    """Whether it can evict while decoding from what another allocation left.

    Args:
      earlier: the allocation of the prompt.
      same_budget: whether the prompt had the budget of these evictions.
    """
    del earlier, same_budget
    return True

  def check_model(self, geometry: Geometry) -> None:
    """Refuses a model that the allocation's file is not for; by default none.

    Raises:
      InputError: it is of other layers or heads.
    """
    del geometry

  @abc.abstractmethod
  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Number of tokens that rows of these lengths keep per head and layer.

    If heads share the budget of a layer, this is their mean, rounded up.
    """

  def totals(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """Number of tokens that all heads of a row keep together in each layer."""
    heads = np.array(sizes.heads, np.int32)[:, None]
    return heads * self.counts(budget, lengths, sizes)

  def parts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], padded: int
  ) -> Int[np.ndarray, "n C"] | None:
    """Number of tokens kept of each part of rows; None for rows as a whole.

    Args:
      budget: the budget.
      lengths: lengths of the rows.
      padded: length of their bucket, which sets C.
    """
    del budget, lengths, padded
    return None

  def capacities(
    self, budget: Budget, padded: int, sizes: Sizes
  ) -> Int[np.ndarray, " L"]:
    """Maximum tokens per head that rows of a bucket keep in each layer."""
    # All lengths: a longer row need not keep more.
    lengths = np.array(bucket_lengths(padded))
    return self.counts(budget, lengths, sizes).max(axis=1)

  def capacity_between(self, budget: Budget, padded: int) -> int:
    """Maximum tokens of a row of up to `padded` after an eviction."""
    return budget.num_kept(padded)

  @property
  def selector(self) -> "Allocation":
    """The allocation that evaluates and selects in its place, of any counts.

    Plans of one method whose selectors are equal share its evaluations.
    """
    return self if overrides(self, Allocation) else Uniform()

  def evaluate(
    self,
    method: Chooser,
    layer: Int[Array, ""],
    cache: LayerCache,
    activations: Activations,
  ) -> PyTree[Array]:
    """Computes what the selection in a layer depends on, for all budgets."""
    return method.evaluate(layer, cache, activations)

  def select(
    self,
    method: Chooser,
    scores: PyTree[Array],
    cache: LayerCache,
    budget: LayerBudget,
  ) -> Int[Array, "B K M"]:
    """Selects the slots to keep, given the result of `evaluate`."""
    return method.select(scores, cache, budget)

  def token_scores(
    self, method: Chooser, scores: PyTree[Array], cache: LayerCache
  ) -> Float[Array, "B K T"] | None:
    """Returns the score of each slot, given the result of `evaluate`."""
    return method.token_scores(scores, cache)

  def is_due(self, cache: LayerCache, budget: LayerBudget) -> Bool[Array, ""]:
    """Whether any row exceeds its budget."""
    return jnp.any(cache.lengths > budget.per_head)

  def check_recursive(self, budget: Budget, name: str) -> None:
    """Refuses a budget that cannot be kept to by repeated evictions.

    Args:
      budget: the budget.
      name: what users call the method and this allocation, for messages.

    Raises:
      InputError: the allocation is not defined for it, as most are not.
    """
    del budget
    raise InputError(
      f"{name} cannot spread a budget block by block or while decoding: it "
      "shares it out once, when the prompt is known."
    )

  def check_protected(
    self,
    protected: Bool[np.ndarray, " n"],
    budget: Budget,
    sizes: Sizes,
    *,
    repeated: bool = False,
  ) -> None:
    """Refuses a row that protects more tokens than it keeps.

    Args:
      protected: for each token of the row.
      budget: budget of the row.
      sizes: layers and heads that it is spread over.
      repeated: whether more evictions follow.

    Raises:
      InputError: they are too many.
    """
    del repeated
    lengths = np.array([len(protected)])
    # Heads that share a budget may keep less than their mean, rounded up.
    heads = np.array(sizes.heads)[:, None]
    most = int((self.totals(budget, lengths, sizes) // heads).min())
    if protected.sum() > most:
      raise InputError(
        f"{protected.sum()} tokens of a prompt are protected and {most} may be "
        "kept; protect fewer or give a larger budget."
      )


def in_all_layers(
  kept: Sequence[int] | Int[np.ndarray, " n"], sizes: Sizes
) -> Int[np.ndarray, "L n"]:
  """Counts of an allocation whose rows keep the same in all layers."""
  return np.tile(np.asarray(kept, np.int32), (sizes.layers, 1))


def overrides(allocation: Allocation, base: type) -> bool:
  """Whether an allocation evaluates or selects otherwise than a base class."""
  names = ("evaluate", "select", "token_scores")
  return any(
    getattr(type(allocation), n) is not getattr(base, n) for n in names
  )


@dataclasses.dataclass(frozen=True)
class Uniform(Allocation):
  """Gives every layer and head the whole budget."""

  def __init_subclass__(cls) -> None:
    # The engine takes it at its word, in blocks and while decoding too.
    raise InputError(
      "Uniform gives all layers and heads the same; derive what counts "
      "otherwise from kvjax.allocation.Allocation."
    )

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """The budget of each row, the same for all layers."""
    kept = [budget.num_kept(int(n)) for n in lengths]
    return in_all_layers(kept, sizes)

  def capacities(
    self, budget: Budget, padded: int, sizes: Sizes
  ) -> Int[np.ndarray, " L"]:
    """The budget of the longest row."""
    return np.full(sizes.layers, budget.num_kept(padded), np.int32)

  def check_recursive(self, budget: Budget, name: str) -> None:
    """Accepts every budget."""
    del budget, name
