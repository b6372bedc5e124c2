"""A method, what it may keep, and when: what one cache is made by."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from kvjax.activations import Activations
from kvjax.budgets import Budget
from kvjax.errors import InputError
from kvjax.lookups import Lookup
from kvjax.methods.base import Method
from kvjax.prompts import Prompts
from kvjax.schedules import WHOLE, Schedule


class Room(NamedTuple):
  """Slots of a layer's new cache, and whether no row has to lose anything."""

  capacity: int
  whole: bool


@dataclasses.dataclass(frozen=True)
class Plan:
  """A method, its budget, and when it compresses.

  Raises InputError where the method is not defined for the schedule, or where
  what it keeps cannot be looked up.

  Attributes:
    method: what to keep.
    budget: how much to keep.
    schedule: when to evict.
    per_query_head: store keys and values once for every query head, which then
      chooses for itself and has the budget to itself, as the original code of
      SnapKV, H2O and PyramidKV does: G times the memory of grouped heads.
    lookup: reads only some of what is kept; None attends to all of it.
  """

  method: Method
  budget: Budget
  schedule: Schedule = WHOLE
  per_query_head: bool = False
  lookup: Lookup | None = None

  def __post_init__(self) -> None:
    if not self.schedule.whole:
      self.method.check_schedule(self.budget)
    if self.lookup is not None:
      self._check_lookup(type(self.lookup.retrieval).__name__)

  def _check_lookup(self, name: str) -> None:
    if not self.schedule.whole:
      raise InputError(
        f"{name} indexes a whole prompt once; it cannot work with "
        f"{self.schedule}."
      )
    kept = type(self.method).__name__
    if self.method.packed:
      raise InputError(
        f"{name} indexes heads that keep as many tokens; those of {kept} do "
        "not."
      )
    if self.method.rerotates:
      raise InputError(
        f"{name} finds keys by the prompt's queries; {kept} turns the keys "
        "afterwards."
      )

  def candidates(self, seen: Activations) -> Activations:
    """A block as the plan's caches hold it."""
    return (
      seen.with_kv_heads(seen.queries.shape[1]) if self.per_query_head else seen
    )

  def counts(
    self, lengths: Int[np.ndarray, " B"], layers: int
  ) -> Int[np.ndarray, "L B"]:
    """Tokens that rows of these lengths keep in each layer."""
    kept = [
      self.method.layer_kept(self.budget, int(n), layers) for n in lengths
    ]
    return np.array(kept, np.int32).T

  def room(
    self, padded: int, lengths: Int[np.ndarray, " B"], layers: int
  ) -> tuple[Int[np.ndarray, "L B"], tuple[Room, ...]]:
    """What rows of these lengths, padded alike, keep in each layer."""
    counts = self.counts(lengths, layers)
    most = self.method.layer_capacities(self.budget, padded, layers)
    return counts, tuple(
      Room(
        capacity=min(max(slots, int(kept.max())), padded),
        whole=slots >= padded and bool(np.all(kept >= lengths)),
      )
      for slots, kept in zip(most, counts, strict=True)
    )

  def check_protected(self, prompts: Prompts, layers: int) -> None:
    """Refuses prompts that protect more tokens than are kept.

    Raises:
      InputError: see `Method.check_protected`.
    """
    if prompts.protected is None:
      return
    rows = zip(prompts.protected, np.asarray(prompts.lengths), strict=True)
    for protected, length in rows:
      self.method.check_protected(protected[:length], self.budget, layers)

  def reach(
    self, lengths: Int[np.ndarray, " B"], layers: int, block: int
  ) -> Int[np.ndarray, " B"]:
    """How far apart the tokens of rows of these lengths stand at most.

    What is rerotated again and again stands no farther apart than what is held
    and a block: such a stream has no end.
    """
    if self.schedule.whole or not self.method.rerotates:
      return lengths
    return np.minimum(lengths, self.counts(lengths, layers).max(axis=0) + block)

  def lasting_capacities(self, padded: int, layers: int) -> tuple[int, ...]:
    """Most tokens that a layer holds between evictions, up to `padded`.

    A layer that the method leaves alone holds everything.
    """
    most = self.method.lasting_capacity(self.budget, padded)
    return tuple(
      padded if self.method.keeps_all(layer) else min(most, padded)
      for layer in range(layers)
    )
