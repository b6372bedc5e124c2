"""Plans: a method, its budget and its schedule."""

import dataclasses
from typing import Any

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation
from kvjax.allocation.by_threshold import ByThreshold
from kvjax.calibration.record import Calibrated
from kvjax.engine.plan_conflicts import (
  check_channels,
  check_joined,
  check_kinds,
  check_kv_dtype,
  check_sparse,
  check_target,
  warn_of_threshold,
)
from kvjax.errors import InputError
from kvjax.labels import name_of
from kvjax.methods.base import Method
from kvjax.options.bounds import check_value
from kvjax.options.budgets import (
  Budget,
  PerLayer,
  Retention,
  Threshold,
  Tokens,
  as_budget,
)
from kvjax.options.schedules import WHOLE, Schedule
from kvjax.retrieval.sparse_attention import SparseAttention


@dataclasses.dataclass(frozen=True)
class Plan:
  """A method, its budget, and when it compresses.

  Raises InputError if the method or the budget has the wrong type, or if the
  parts cannot be combined: the method does not support the schedule or the
  allocation, the kept tokens cannot be retrieved, a calibration belongs to
  another method or the schedule does not wait for the whole prompt, or the
  prompt and the decoding need methods that cannot follow each other.

  Attributes:
    method: selects the tokens to keep.
    budget: how many tokens to keep, or a number for it, as in `get_plan`;
      `PerLayer` gives each layer its own, and `Calibrated` and `Threshold`
      adapt to each prompt.
    schedule: when to evict.
    per_query_head: store keys and values once per query head. Each query head
      then selects its own tokens and has its own budget, as in the original
      code of SnapKV, H2O and PyramidKV. This takes G times the memory.
    sparse: retrieval among the kept tokens; None attends to all of them.
    kv_dtype: "int8" or "fp8" stores kept and appended tokens in eight bits,
      with a scale per token and head; None does not quantize. The method
      selects before quantization, so its selection does not change. Layers with
      a window are never quantized.
    allocation: how the budget is spread over layers and heads; None for the
      method's default, which for most methods is uniform.
    decoding: plan of the evictions while decoding, if their method or budget is
      another; its schedule says when. None if the schedule of this plan does.
      It is no `kvjax.Decoding`, which says how tokens are drawn.

  Examples:
    >>> import kvjax
    >>> method = kvjax.get_method("snapkv:window=4")
    >>> plan = kvjax.Plan(method, 0.25, kv_dtype="int8")
    >>> plan.budget.share
    0.25
  """

  method: Method
  budget: Budget | PerLayer | Calibrated | Threshold
  schedule: Schedule
  per_query_head: bool
  sparse: SparseAttention | None
  kv_dtype: str | None
  allocation: Allocation | None
  decoding: "Plan | None"

  # Not the generated one, which would take no number for a budget.
  def __init__(
    self,
    method: Method,
    budget: float | Budget | PerLayer | Calibrated | Threshold,
    *,
    schedule: Schedule = WHOLE,
    per_query_head: bool = False,
    sparse: SparseAttention | None = None,
    kv_dtype: str | None = None,
    allocation: Allocation | None = None,
    decoding: "Plan | None" = None,
  ) -> None:
    vars(self).update(
      method=method,
      budget=as_budget(budget),
      schedule=schedule,
      per_query_head=per_query_head,
      sparse=sparse,
      kv_dtype=kv_dtype,
      allocation=allocation,
      decoding=decoding,
    )
    self._check()

  def _check(self) -> None:
    # Types first: all other checks read attributes of the parts.
    check_kinds(self.method, self.budget)
    self._check_parts()
    if self.allocation is not None:
      self._check_allocation(self.allocation)
    if isinstance(self.budget, Calibrated):
      self._check_calibrated(self.budget)
    elif isinstance(self.budget, Threshold):
      self._check_threshold(self.budget)
    elif isinstance(self.budget, PerLayer):
      self._check_per_layer()
    elif not self.schedule.is_whole_prompt:
      self._check_schedule()
    if self.sparse is not None:
      check_sparse(
        name_of(self.sparse.retrieval),
        self.name,
        self.method.traits,
        self.spread,
        self.schedule,
      )
    if self.kv_dtype is not None:
      index = None if self.sparse is None else name_of(self.sparse.retrieval)
      check_kv_dtype(self.kv_dtype, self.schedule, index)
    if self.decoding is not None:
      self._check_decoding(self.decoding)
    if self.method.traits.joins_layers:
      check_joined(self.method, self.spread, self.budget)
    check_channels(
      self.method,
      {
        "heads that keep different numbers of tokens": self.spread.ragged,
        "a replay of the prompt": self.method.traits.replay is not None,
        "a budget that is known after the prompt": self.adapts,
        "kept tokens that move": self.method.traits.renumbers,
        "keys of eight bits": self.kv_dtype is not None,
        "retrieval": self.sparse is not None,
        "evictions while decoding": self.while_decoding is not None,
      },
    )

  @property
  def spread(self) -> Allocation:
    """The allocation; the method's default if none is given.

    A threshold takes the place of any.
    """
    if isinstance(self.budget, Threshold):
      return ByThreshold()
    return self.allocation or self.method.allocation

  @property
  def while_decoding(self) -> "Plan | None":
    """The plan of the evictions while decoding, if there are any."""
    if self.schedule.every is not None:
      return self
    return self.decoding

  @property
  def name(self) -> str:
    """What `get_plan` calls the method and its allocation, without options."""
    return name_of(self.method, self.allocation)

  @property
  def prompt_label(self) -> str:
    """The method with all its options, and the allocation if one is given."""
    if self.allocation is None:
      return str(self.method)
    return f"{self.method} by {self.allocation}"

  @property
  def label(self) -> str:
    """What compresses the prompt, and what evicts while decoding if it differs.

    It has all options.
    """
    later = self.decoding
    if later is None:
      return self.prompt_label
    return (
      f"{self.prompt_label}, then {later.label} at {later.budget}, "
      f"{later.schedule}"
    )

  @property
  def fixed_budget(self) -> Budget:
    """The budget, which must be the same for all layers and prompts."""
    assert isinstance(self.budget, Budget)
    return self.budget

  @property
  def adapts(self) -> bool:
    """Whether the budget is known only once the prompt has been read."""
    return isinstance(self.budget, Calibrated | Threshold)

  @property
  def keeps_prompts(self) -> bool:
    """Whether the budget is all of every prompt."""
    return isinstance(self.budget, Retention) and self.budget.share == 1

  @property
  def _same_for_heads(self) -> bool:
    """Whether the heads of a layer keep the same tokens of prompts."""
    traits = self.method.traits
    by_position = traits.positional and not traits.stochastic
    whole = traits.keeps_all or self.keeps_prompts
    return whole or (
      (traits.joins_heads or by_position) and not self.spread.ragged
    )

  @property
  def pageable(self) -> bool:
    """Whether pages can hold its caches, since nothing moves tokens later."""
    moves = self.while_decoding is not None or self.method.traits.renumbers
    return not (moves or self.stores_by_queries)

  @property
  def stores_by_queries(self) -> bool:
    """Whether the index or the channels of kept tokens depend on queries."""
    return self.sparse is not None or self.method.traits.channels is not None

  def candidates(self, activations: Activations) -> Activations:
    """Repeats keys and values as the plan's caches store them."""
    if not self.per_query_head:
      return activations
    return activations.with_kv_heads(activations.queries.shape[1])

  def _check_parts(self) -> None:
    """Checks the types of parts, for callers without a type checker."""
    parts: tuple[tuple[str, Any, type, str], ...] = (
      ("schedule", self.schedule, Schedule, "Schedule(block=128)"),
      ("allocation", self.allocation, Allocation, "allocation.Uniform()"),
      ("sparse", self.sparse, SparseAttention, "SparseAttention(...)"),
      ("decoding", self.decoding, Plan, "Plan(...)"),
    )
    for name, given, kind, how in parts:
      optional = kind is not Schedule
      if not isinstance(given, kind) and not (optional and given is None):
        raise InputError(
          f"The {name} of a plan is a kvjax.{how}; {given!r} is not."
        )
    # Any text would count as true.
    if not isinstance(self.per_query_head, bool):
      raise InputError(
        "per_query_head of a plan is True or False; "
        f"{self.per_query_head!r} is neither."
      )

  def _check_allocation(self, allocation: Allocation) -> None:
    check_value(allocation)
    name, traits = name_of(self.method), self.method.traits
    if traits.even:
      raise InputError(
        f"The budget of {name} cannot be spread unevenly over layers or heads: "
        f"{traits.even}."
      )
    joint = self.method.allocation.ragged and not allocation.ragged
    if joint and not self.method.ranks_slots:
      raise InputError(
        f"The heads of {name} share a budget as its options say; this "
        "allocation gives each its own: change the options, or leave out the "
        "allocation."
      )
    # A method whose own allocation is ragged knows how to share without votes.
    shares = allocation.ragged and not self.method.allocation.ragged
    if (allocation.votes or shares) and self.method.votes is None:
      raise InputError(
        "Heads compete by scores of tokens that are final before the budget is "
        f"known or by the votes of an observation window; {name} has neither."
      )
    if allocation.ranks_slots and not self.method.ranks_slots:
      raise InputError(
        "Heads share this budget by the scores that select their slots; "
        f"{name} does not select by scores of single slots."
      )
    if not self.schedule.is_whole_prompt and isinstance(self.budget, Budget):
      allocation.check_recursive(self.budget, self.name)

  def _check_per_layer(self) -> None:
    reason = self.method.traits.even
    if self.spread.spreads_layers:
      reason = "it spreads one over the layers itself"
    if not self.schedule.is_whole_prompt:
      reason = "block by block and while decoding, all layers have the same"
    if reason:
      raise InputError(
        f"{self.name} cannot have a budget for each layer: {reason}; give one "
        "budget for all layers."
      )

  def _check_decoding(self, later: "Plan") -> None:
    reason = ""
    if not self.schedule.is_whole_prompt:
      reason = (
        "this plan compresses the whole prompt once; leave out its schedule"
      )
    elif later.schedule.every is None or later.schedule.block is not None:
      reason = "its schedule must be kvjax.Schedule(every=...), without blocks"
    elif self.spread.ragged:
      reason = (
        f"the heads of {self.name} keep different numbers of tokens, which "
        "cannot be evicted from again; use one whose heads keep equally many, "
        "such as kvzip:level=head"
      )
    elif self.sparse is not None or self.kv_dtype is not None:
      reason = (
        "it chooses among keys as they were computed, not those of an index "
        "or of eight bits"
      )
    elif self.per_query_head != later.per_query_head:
      reason = "both plans need the same per_query_head"
    elif not self.method.traits.keeps_all and not later.spread.can_follow(
      self.spread, same_budget=self.budget == later.budget
    ):
      reason = (
        "it counts on what it kept itself, and evicts no token later; let the "
        "same method with the same budget, or full, keep the prompt"
      )
    elif later.method.traits.joins_layers and not (
      self.method.traits.keeps_all
      or self.method.without_files() == later.method.without_files()
    ):
      reason = (
        "it evicts the same tokens from all layers, which must have the same; "
        "let the same method, or full, keep the prompt"
      )
    elif later.method.traits.joins_heads and not self._same_for_heads:
      reason = (
        "it evicts the same tokens from all heads of a layer, which must have "
        "the same; let the same method, or full, keep the prompt"
      )
    elif self.method.traits.renumbers != later.method.traits.renumbers:
      reason = "either both methods renumber the kept tokens or neither does"
    if reason:
      raise InputError(
        f"{later.name} cannot evict while decoding what {self.name} kept of "
        f"the prompt: {reason}."
      )

  def _check_schedule(self) -> None:
    traits = self.method.traits
    if traits.whole_prompts_only:
      raise InputError(
        f"{self.name} cannot evict block by block or while decoding: "
        f"{traits.whole_prompts_only}."
      )
    # What the model can do at any time is not lost with a block.
    lost = sorted(traits.always - {"rerotate"})
    if lost:
      raise InputError(
        f"{self.name} cannot evict block by block or while decoding: it reads "
        f"{', '.join(lost)}, which no cache stores."
      )
    self.spread.check_recursive(self.fixed_budget, self.name)
    if self.schedule.every is not None and isinstance(self.budget, Tokens):
      check_target(self.name, traits, self.budget.count)

  def _check_calibrated(self, budget: Calibrated) -> None:
    budget.calibration.check(self.prompt_label, self.per_query_head)
    if not self.schedule.is_whole_prompt:
      raise InputError(
        "A calibrated retention is known when the whole prompt has been read; "
        f"it cannot work with {self.schedule}."
      )
    if self.sparse is not None:
      raise InputError(
        "A calibrated retention is known when the whole prompt has been read, "
        f"which is after {name_of(self.sparse.retrieval)} has indexed it; "
        "give a fixed budget."
      )

  def _check_threshold(self, threshold: Threshold) -> None:
    bounds = self.method.traits.score_range
    reason = ""
    if bounds is None or not self.method.ranks_slots:
      reason = (
        "its scores have no range that all prompts, layers and heads share, as "
        "those of kvzap and fast_kvzip have; give a number of tokens or a share"
      )
    elif self.allocation is not None:
      reason = (
        "its allocation spreads a budget over heads, and a threshold says "
        "what each head keeps; leave out one of the two"
      )
    elif not self.schedule.is_whole_prompt:
      reason = (
        f"tokens are judged once, after the whole prompt, not in "
        f"{self.schedule}"
      )
    if reason:
      raise InputError(f"{self.name} cannot have a threshold: {reason}.")
    assert bounds is not None
    warn_of_threshold(self.name, bounds, threshold)
