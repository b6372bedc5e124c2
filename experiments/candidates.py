"""What a comparison compares: methods, each at several budgets."""

import dataclasses
from collections.abc import Sequence

import kvjax
from kvjax.errors import InputError
from kvjax.methods import METHODS, Method
from kvjax.schedules import WHOLE

FULL = "full"


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A method at a budget.

  Attributes:
    method: its name as the user gave it.
    plan: what the name and the budget stand for.
  """

  method: str
  plan: kvjax.Plan

  @property
  def options(self) -> str:
    """The method with all its hyper-parameters."""
    return str(self.plan.method)

  @property
  def budget(self) -> str:
    """The budget in words: `0.25` or `128 tokens`."""
    return str(self.plan.budget)

  def retention(self, context_tokens: int) -> float:
    """Share of a context that the budget allows to keep."""
    budget = self.plan.budget
    if isinstance(budget, kvjax.Retention):
      return budget.share
    return budget.kept(context_tokens) / context_tokens


def candidates(
  methods: Sequence[str],
  budgets: Sequence[kvjax.Budget],
  schedule: kvjax.Schedule = WHOLE,
  per_query_head: bool = False,
) -> tuple[Candidate, ...]:
  """Every method at every budget, the full cache first: the yardstick.

  At a retention of 1 every method is the full cache.

  Args:
    methods: names as `kvjax.get_method` reads them.
    budgets: what the methods may keep.
    schedule: when they evict.
    per_query_head: see `kvjax.Plan`.

  Raises:
    InputError: a name stands for no method, a method is not defined for the
      schedule, or either list is empty.
  """
  names = dict.fromkeys(name.strip() for name in methods)
  if not names or not budgets:
    raise InputError("There is nothing to compare; name a method and a budget.")
  found = {name: kvjax.get_method(name) for name in names}
  whole = kvjax.Retention(1.0)
  full = kvjax.Plan(METHODS[FULL](), whole, per_query_head=per_query_head)
  chosen = [Candidate(FULL, full)]
  for name, method in found.items():
    if name != FULL:
      chosen.extend(
        Candidate(name, _plan(name, method, budget, schedule, per_query_head))
        for budget in dict.fromkeys(budgets)
        if budget != whole
      )
  return tuple(chosen)


def _plan(
  name: str,
  method: Method,
  budget: kvjax.Budget,
  schedule: kvjax.Schedule,
  per_query_head: bool,
) -> kvjax.Plan:
  try:
    return kvjax.Plan(method, budget, schedule, per_query_head)
  except InputError as error:
    raise InputError(f"--methods has {name}: {error}") from error
