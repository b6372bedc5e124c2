"""A method, what it may keep, and when: what one cache is made by."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int

from kvjax.activations import Activations
from kvjax.cache.quantized import STORAGES
from kvjax.calibration.record import Calibrated
from kvjax.errors import InputError
from kvjax.methods.base import Method
from kvjax.model import Geometry
from kvjax.options.budgets import Budget, Retention
from kvjax.options.schedules import WHOLE, Schedule
from kvjax.prompts import Prompts
from kvjax.retrieval.lookups import Lookup

_ALL = Retention(1.0)


class Room(NamedTuple):
  """Slots of a layer's new cache, and whether no row has to lose anything."""

  capacity: int
  whole: bool


class Kept(NamedTuple):
  """Tokens that rows keep in each layer.

  Attributes:
    each: of each KV head; for some methods on average.
    together: of all heads.
  """

  each: Int[Array, "L B"] | Int[np.ndarray, "L B"]
  together: Int[Array, "L B"] | Int[np.ndarray, "L B"]


@dataclasses.dataclass(frozen=True)
class Plan:
  """A method, its budget, and when it compresses.

  Raises InputError where a name stands for the method or a number for the
  budget, where the method is not defined for the schedule, where what it keeps
  cannot be looked up, or where a calibration is another method's or the plan
  does not wait for the whole prompt.

  Attributes:
    method: what to keep.
    budget: how much to keep; `Calibrated` is what each prompt can bear.
    schedule: when to evict.
    per_query_head: store keys and values once for every query head, which then
      chooses for itself and has the budget to itself, as the original code of
      SnapKV, H2O and PyramidKV does: G times the memory of grouped heads.
    lookup: reads only some of what is kept; None attends to all of it.
    storage: "int8" or "fp8" holds what is kept, and what comes after it, in
      eight bits and a scale for each token of a head; None as it was computed.
      The method chooses before anything is rounded, so that it keeps the same.
  """

  method: Method
  budget: Budget | Calibrated
  schedule: Schedule = WHOLE
  per_query_head: bool = False
  lookup: Lookup | None = None
  storage: str | None = None

  def __post_init__(self) -> None:
    self._check_kinds(self.method, self.budget)
    if isinstance(self.budget, Calibrated):
      self._check_calibrated(self.budget)
    elif not self.schedule.whole:
      self.method.check_schedule(self.budget)
    if self.lookup is not None:
      self._check_lookup(type(self.lookup.retrieval).__name__)
    if self.storage is not None:
      self._check_storage(self.storage)

  @staticmethod
  def _check_kinds(method: Any, budget: Any) -> None:
    """Of `Any`, as it is those that check no types who need to be told."""
    if not isinstance(method, Method):
      raise InputError(
        "A plan's method is one that kvjax.get_method has made; "
        f"{method!r} is no such method: kvjax.get_plan takes names, those of "
        "retrieval methods too."
      )
    if not isinstance(budget, Budget | Calibrated):
      raise InputError(
        "A plan's budget is kvjax.Retention(0.25), kvjax.Tokens(512) or a "
        f"kvjax.Calibrated; {budget!r} is none of them."
      )

  def _check_calibrated(self, budget: Calibrated) -> None:
    budget.calibration.check(self.method, self.per_query_head)
    if not self.schedule.whole:
      raise InputError(
        "A calibrated retention is known when the whole prompt has been read; "
        f"it cannot work with {self.schedule}."
      )
    if self.lookup is not None:
      raise InputError(
        "A calibrated retention is known when the whole prompt has been read, "
        f"which is after {type(self.lookup.retrieval).__name__} has indexed "
        "it; give a fixed budget."
      )

  @property
  def judging(self) -> "Plan":
    """What finds the same in a prompt.

    That depends neither on the budget, nor on how often it is asked, nor on how
    the kept is stored.
    """
    every = 1 if self.schedule.every else None
    return dataclasses.replace(
      self,
      budget=_ALL,
      schedule=Schedule(every=every),
      lookup=None,
      storage=None,
    )

  def chooses_in(self, layer: int, layers: int) -> bool:
    """Whether any layer keeps what is chosen in this one."""
    method = self.method
    return any(
      method.source_layer(index) == layer and not method.keeps_all(index)
      for index in range(layers)
    )

  @property
  def fixed_budget(self) -> Budget:
    """The budget of a plan that does not wait for the prompt to be read."""
    assert not isinstance(self.budget, Calibrated)
    return self.budget

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

  def _check_storage(self, storage: str) -> None:
    if storage not in STORAGES:
      raise InputError(
        f"storage must be one of {', '.join(STORAGES)}; {storage!r} is not."
      )
    if self.schedule.every is not None:
      raise InputError(
        "A method chooses among keys as they were computed; it cannot go on "
        f"evicting while decoding where they are stored in {storage}, so leave "
        "out one of the two."
      )
    if self.lookup is not None:
      name = type(self.lookup.retrieval).__name__
      raise InputError(
        f"{name} looks up keys as they were computed; it cannot work with "
        f"storage in {storage}, so leave out one of the two."
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
      self.method.layer_kept(self.fixed_budget, int(n), layers) for n in lengths
    ]
    return np.array(kept, np.int32).T

  def kept(self, lengths: Int[np.ndarray, " B"], geometry: Geometry) -> Kept:
    """What rows of these lengths keep in each layer."""
    heads = geometry.heads if self.per_query_head else geometry.kv_heads
    layers = geometry.layers
    together = [
      self.method.layer_together(self.fixed_budget, int(n), layers, heads)
      for n in lengths
    ]
    return Kept(self.counts(lengths, layers), np.array(together, np.int32).T)

  def room(
    self, padded: int, lengths: Int[np.ndarray, " B"], layers: int
  ) -> tuple[Room, ...]:
    """Slots for rows of these lengths, padded alike, in each layer."""
    counts = self.counts(lengths, layers)
    most = self.method.layer_capacities(self.fixed_budget, padded, layers)
    return tuple(
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
      budget = self.fixed_budget
      self.method.check_protected(protected[:length], budget, layers)

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
    most = self.method.lasting_capacity(self.fixed_budget, padded)
    return tuple(
      padded if self.method.keeps_all(layer) else min(most, padded)
      for layer in range(layers)
    )
