"""Plans by name, for eviction and retrieval alike."""

from collections.abc import Mapping
from typing import Any

from kvjax.calibration.record import Calibrated
from kvjax.engine.plans import Plan
from kvjax.errors import InputError
from kvjax.methods.base import Method
from kvjax.methods.full import FullKV
from kvjax.methods.registry import METHODS, PRESETS, get_method
from kvjax.options.budgets import Budget, Retention, Tokens
from kvjax.options.naming import named
from kvjax.options.schedules import WHOLE, Schedule
from kvjax.retrieval.lookups import Lookup
from kvjax.retrieval.registry import (
  RETRIEVAL_PRESETS,
  RETRIEVALS,
  get_retrieval,
)

_RETRIEVALS = {*RETRIEVALS, *RETRIEVAL_PRESETS}
_MAKERS: Mapping[str, Any] = {**METHODS, **RETRIEVALS}
_PRESETS: Mapping[str, Any] = {**PRESETS, **RETRIEVAL_PRESETS}


def get_plan(
  name: str,
  budget: Budget | Calibrated,
  schedule: Schedule = WHOLE,
  per_query_head: bool = False,
  storage: str | None = None,
) -> Plan:
  """The plan that the name of a method stands for at a budget.

  Args:
    name: as `kvjax.get_method` and `kvjax.get_retrieval` read it. A retrieval
      method may be followed by what is kept in the first place, and how much
      of it: `ctkvr/compactor@0.5` indexes the half that Compactor keeps,
      `flat/keydiff@256` the 256 tokens of KeyDiff.
    budget: what an eviction method may keep, or how many keys a retrieval
      method looks up per token, if it does not say so itself (`ctkvr.512`);
      `Calibrated` is for eviction methods.
    schedule: when an eviction method evicts.
    per_query_head: see `Plan`.
    storage: see `Plan`; eviction methods only.

  Raises:
    InputError: the name stands for no method, or the method is not defined for
      the schedule, the budget or the storage.
  """
  name = name.strip()
  first, slash, kept = name.partition("/")
  looks_up = "@" in kept or first.partition(":")[0] in _RETRIEVALS
  if not looks_up:
    # The prefixes of eviction methods end in a slash too.
    method: Any = get_method(name) if slash else named(name, _MAKERS, _PRESETS)
    return Plan(method, budget, schedule, per_query_head, storage=storage)
  retrieval = get_retrieval(first)
  if isinstance(budget, Calibrated):
    raise InputError(
      f"A calibration says what a context can lose; {first} loses nothing, so "
      "give it the number of keys to look up."
    )
  if retrieval.reads:
    budget = Tokens(retrieval.reads)
  method, share = _kept(kept) if slash else (FullKV(), Retention(1.0))
  lookup = Lookup(retrieval, budget)
  return Plan(method, share, schedule, per_query_head, lookup, storage)


def _kept(text: str) -> tuple[Method, Budget]:
  """What is kept in the first place, and how much of it."""
  name, _, amount = text.rpartition("@")
  try:
    share: Budget = (
      Retention(float(amount)) if "." in amount else Tokens(int(amount))
    )
  except ValueError as error:
    raise InputError(
      f"What is kept is written as compactor@0.5 or keydiff@256; {text!r} does "
      "not fit."
    ) from error
  return get_method(name), share
