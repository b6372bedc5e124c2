"""Plans: a method, its budget and its schedule."""

import dataclasses
from typing import Any

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation
from kvjax.cache.layers import KV_DTYPES
from kvjax.calibration.record import Calibrated
from kvjax.errors import InputError
from kvjax.methods.base import Method
from kvjax.options.budgets import Budget
from kvjax.options.schedules import WHOLE, Schedule
from kvjax.retrieval.sparse_attention import SparseAttention


@dataclasses.dataclass(frozen=True)
class Plan:
  """A method, its budget, and when it compresses.

  Raises InputError if the method or the budget has the wrong type, or if the
  parts cannot be combined: the method does not support the schedule or the
  allocation, the kept tokens cannot be retrieved, or a calibration belongs to
  another method or the schedule does not wait for the whole prompt.

  Attributes:
    method: selects the tokens to keep.
    budget: how many tokens to keep; `Calibrated` adapts to each prompt.
    schedule: when to evict.
    per_query_head: store keys and values once per query head. Each query head
      then selects its own tokens and has its own budget, as in the original
      code of SnapKV, H2O and PyramidKV. This takes G times the memory.
    sparse: retrieval among the kept tokens; None attends to all of them.
    kv_dtype: "int8" or "fp8" stores kept and appended tokens in eight bits,
      with a scale per token and head; None does not quantize. The method
      selects before quantization, so its selection does not change.
    allocation: how the budget is spread over layers and heads; None for the
      method's default, which for most methods is uniform.

  Example:
    >>> import kvjax
    >>> method = kvjax.get_method("snapkv:window=4")
    >>> plan = kvjax.Plan(method, kvjax.Retention(0.25), kv_dtype="int8")
    >>> plan.budget
    Retention(share=0.25)
  """

  method: Method
  budget: Budget | Calibrated
  schedule: Schedule = WHOLE
  per_query_head: bool = False
  sparse: SparseAttention | None = None
  kv_dtype: str | None = None
  allocation: Allocation | None = None

  def __post_init__(self) -> None:
    self._check_kinds(self.method, self.budget)
    if self.allocation is not None:
      self._check_allocation(self.allocation)
    if isinstance(self.budget, Calibrated):
      self._check_calibrated(self.budget)
    elif not self.schedule.is_whole_prompt:
      self._check_schedule()
    if self.sparse is not None:
      self._check_sparse(type(self.sparse.retrieval).__name__)
    if self.kv_dtype is not None:
      self._check_kv_dtype(self.kv_dtype)

  @property
  def spread(self) -> Allocation:
    """The allocation; the method's default if none is given."""
    return self.allocation or self.method.allocation

  @property
  def label(self) -> str:
    """The method with all its options, and the allocation if one is given."""
    if self.allocation is None:
      return str(self.method)
    return f"{self.method} by {self.allocation}"

  @property
  def fixed_budget(self) -> Budget:
    """The budget, which must not be a calibrated one."""
    assert not isinstance(self.budget, Calibrated)
    return self.budget

  @property
  def activations(self) -> frozenset[str]:
    """Optional activations that the plan depends on."""
    return self.method.traits.activations

  def candidates(self, activations: Activations) -> Activations:
    """Repeats keys and values as the plan's caches store them."""
    if not self.per_query_head:
      return activations
    return activations.with_kv_heads(activations.queries.shape[1])

  @staticmethod
  def _check_kinds(method: Any, budget: Any) -> None:
    """Checks types, for callers without a static type checker."""
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

  def _check_allocation(self, allocation: Allocation) -> None:
    name, traits = type(self.method).__name__, self.method.traits
    if traits.even:
      raise InputError(
        f"The budget of {name} cannot be spread unevenly over layers or heads: "
        f"{traits.even}."
      )
    shares = allocation.ragged and not self.method.allocation.ragged
    if (allocation.votes or shares) and self.method.votes is None:
      raise InputError(
        "Heads compete by the scores of slots or the votes of an observation "
        f"window; {name} has neither."
      )
    if not self.schedule.is_whole_prompt:
      raise InputError(
        f"{type(allocation).__name__} cannot spread a budget block by block or "
        "while decoding: it shares it out once, when the prompt is known."
      )

  def _check_schedule(self) -> None:
    traits = self.method.traits
    if traits.whole_prompts_only:
      raise InputError(
        f"{type(self.method).__name__} cannot evict block by block or while "
        f"decoding: {traits.whole_prompts_only}."
      )
    self.spread.check_recursive(self.fixed_budget)

  def _check_calibrated(self, budget: Calibrated) -> None:
    budget.calibration.check(self.label, self.per_query_head)
    if not self.schedule.is_whole_prompt:
      raise InputError(
        "A calibrated retention is known when the whole prompt has been read; "
        f"it cannot work with {self.schedule}."
      )
    if self.sparse is not None:
      raise InputError(
        "A calibrated retention is known when the whole prompt has been read, "
        f"which is after {type(self.sparse.retrieval).__name__} has indexed "
        "it; give a fixed budget."
      )

  def _check_sparse(self, name: str) -> None:
    if not self.schedule.is_whole_prompt:
      raise InputError(
        f"{name} indexes a whole prompt once; it cannot work with "
        f"{self.schedule}."
      )
    kept = type(self.method).__name__
    if self.spread.ragged:
      shared = type(self.allocation or self.method).__name__
      raise InputError(
        f"{name} indexes heads that keep as many tokens; those of {shared} do "
        "not."
      )
    if self.method.traits.renumbers:
      raise InputError(
        f"{name} finds keys by the prompt's queries; {kept} turns the keys "
        "afterwards."
      )

  def _check_kv_dtype(self, kv_dtype: str) -> None:
    if kv_dtype not in KV_DTYPES:
      raise InputError(
        f"kv_dtype must be one of {', '.join(KV_DTYPES)}; {kv_dtype!r} is not."
      )
    if self.schedule.every is not None:
      raise InputError(
        "A method chooses among keys as they were computed; it cannot go on "
        f"evicting while decoding where they are stored in {kv_dtype}, so "
        "leave out one of the two."
      )
    if self.sparse is not None:
      name = type(self.sparse.retrieval).__name__
      raise InputError(
        f"{name} retrieves keys as they were computed; it cannot work with "
        f"keys in {kv_dtype}, so leave out one of the two."
      )
