"""Parts of plans that are none, exclude each other, or may surprise users."""

import math
from collections.abc import Mapping
from typing import Any

from kvjax.allocation.base import Allocation
from kvjax.cache.layers import KV_DTYPES
from kvjax.calibration.record import Calibrated
from kvjax.errors import InputError, warn
from kvjax.labels import name_of
from kvjax.methods.base import Method
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_value
from kvjax.options.budgets import Budget, PerLayer, Threshold
from kvjax.options.schedules import Schedule
from kvjax.retrieval.base import Retrieval


def check_kinds(method: Any, budget: Any) -> None:
  """Refuses what is no method or no budget, for callers without a type checker.

  Raises:
    InputError: one of them has another type.
  """
  if not isinstance(method, Method):
    reason = (
      f"{method!r} is no such method: kvjax.get_plan takes names, those of "
      "retrieval methods too"
    )
    if isinstance(method, type) and issubclass(method, Method):
      name = method.__name__
      reason = f"{name} is a class: write {name}()"
    if isinstance(method, Retrieval):
      reason += (
        ", and a plan of kvjax.get_method('full') with a budget of 1.0 takes "
        "this one as sparse=kvjax.SparseAttention(retrieval, keys)"
      )
    raise InputError(
      "A plan's method is a kvjax.methods.Method, such as "
      f"kvjax.get_method('keydiff'); {reason}."
    )
  check_value(method)
  if not isinstance(method.traits, Traits):
    raise InputError(
      f"The traits of {type(method).__name__} must be a "
      f"kvjax.methods.Traits; they are {method.traits!r}."
    )
  if not isinstance(budget, Budget | PerLayer | Calibrated | Threshold):
    raise InputError(
      "A plan's budget is a share such as 0.25, tokens such as 512, a "
      "kvjax.PerLayer, a kvjax.Calibrated or a kvjax.Threshold; "
      f"{budget!r} is none of them."
    )


def check_channels(method: Method, parts: Mapping[str, bool]) -> None:
  """Refuses to drop channels where that cannot be done.

  Args:
    method: the method of a plan.
    parts: by what needs whole keys, or other tokens than all heads have,
      whether the plan has it.

  Raises:
    InputError: the method drops channels, and the plan has such a part.
  """
  found = [what for what, given in parts.items() if given]
  if method.traits.channels is not None and found:
    raise InputError(
      f"{name_of(method)} drops channels of the kept keys of each layer, once "
      "the layer has read the prompt; it cannot work with "
      f"{' and '.join(found)}."
    )


def check_joined(method: Method, spread: Allocation, budget: Any) -> None:
  """Refuses budgets with which layers or heads keep different tokens.

  Args:
    method: a method that selects once for all layers.
    spread: the allocation of its budget.
    budget: the budget.

  Raises:
    InputError: some layers or heads keep more tokens than others.
  """
  if spread.ragged or spread.spreads_layers or isinstance(budget, PerLayer):
    raise InputError(
      f"With these options, {name_of(method)} keeps the same tokens in all "
      "layers, so that no layer or head can have a budget of its own; give one "
      "for all, without an allocation, or other options."
    )


def check_kv_dtype(
  kv_dtype: str, schedule: Schedule, retrieval: str | None
) -> None:
  """Refuses to quantize to an unknown dtype, or what is read as computed.

  Args:
    kv_dtype: dtype to quantize keys and values to.
    schedule: when to evict.
    retrieval: name of the retrieval method, if there is one.

  Raises:
    InputError: evictions go on while decoding, or keys are retrieved.
  """
  if kv_dtype not in KV_DTYPES:
    raise InputError(
      f"kv_dtype must be one of {', '.join(KV_DTYPES)}; {kv_dtype!r} is not."
    )
  if schedule.every is not None:
    raise InputError(
      "A method chooses among keys as they were computed; it cannot go on "
      f"evicting while decoding where they are stored in {kv_dtype}, so "
      "leave out one of the two."
    )
  if retrieval is not None:
    raise InputError(
      f"{retrieval} retrieves keys as they were computed; it cannot work with "
      f"keys in {kv_dtype}, so leave out one of the two."
    )


def check_sparse(
  name: str, kept: str, traits: Traits, spread: Allocation, schedule: Schedule
) -> None:
  """Refuses to retrieve from tokens that cannot be indexed.

  Args:
    name: name of the retrieval method.
    kept: name of what keeps the tokens.
    traits: traits of its method.
    spread: allocation of its budget.
    schedule: when to evict.

  Raises:
    InputError: the tokens cannot be indexed.
  """
  if not schedule.is_whole_prompt:
    raise InputError(
      f"{name} indexes a whole prompt once; it cannot work with {schedule}."
    )
  if traits.replay is not None:
    raise InputError(
      f"{name} indexes a prompt by its queries, which {kept} does not keep "
      "until it has replayed the prompt; give it a cache of another method."
    )
  if spread.ragged:
    raise InputError(
      f"{name} indexes heads that keep as many tokens; those of {kept} do not."
    )
  if traits.renumbers:
    raise InputError(
      f"{name} finds keys by the prompt's queries; {kept} turns the keys "
      "afterwards."
    )


def check_target(name: str, traits: Traits, count: int) -> None:
  """Refuses a target while decoding that what always stays exceeds.

  Args:
    name: name of the method.
    traits: its traits.
    count: tokens to evict to.

  Raises:
    InputError: it keeps more.
  """
  least = traits.protects + traits.sinks
  if count < least:
    numbers = {"first": traits.sinks, "last": traits.protects}
    parts = [f"the {which} {n}" for which, n in numbers.items() if n]
    raise InputError(
      f"{name} always keeps {' and '.join(parts)} tokens; evict to {least} "
      f"tokens or more while decoding, not {count}, or set its options lower."
    )


def warn_of_threshold(
  name: str, bounds: tuple[float, float], threshold: Threshold
) -> None:
  """Warns of a threshold that may keep all tokens or few but the last.

  Args:
    name: name of the method.
    bounds: its lowest and highest score; infinite if not known.
    threshold: the threshold; infinite ones are meant so.
  """
  low, high = bounds
  said, least = "", threshold.least
  if low == -math.inf and high == math.inf:
    said = (
      f"Nothing says which scores {name} gives, so that the threshold "
      f"{least:g} may keep all tokens or few but the last; kvjax train_gate "
      "writes their range to a gate's config.json, as score_range."
    )
  elif not low <= least <= high:
    said = (
      f"The scores of {name} are from {low:g} to {high:g}, by definition or "
      "of the texts it was tested with, and the threshold is "
      f"{least:g}: it is likely to keep "
      f"{'all tokens' if least < low else 'few but the last'}."
    )
  if said and math.isfinite(least):
    warn(said)
