"""Methods and plans by name, for eviction and retrieval."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from kvjax.allocation.base import Allocation
from kvjax.calibration.record import Calibrated
from kvjax.engine.compression_plan import Plan
from kvjax.errors import InputError
from kvjax.methods.base import Method
from kvjax.methods.full import FullKV
from kvjax.options.budgets import (
  Budget,
  PerLayer,
  Retention,
  Rounding,
  Threshold,
  Tokens,
  as_budget,
)
from kvjax.options.schedules import WHOLE, Schedule
from kvjax.registry.parsing import (
  make_named,
  options_of,
  split_options,
  unknown,
  with_options,
)
from kvjax.registry.registry import (
  METHODS,
  RETRIEVALS,
  Recipe,
  load_plugins,
  recipe_of,
)
from kvjax.registry.wrappers import WRAPPERS, wrap
from kvjax.retrieval.base import Retrieval
from kvjax.retrieval.sparse_attention import SparseAttention

_PlanBudget = Budget | PerLayer | Calibrated | Threshold


def get_recipe(name: str) -> Recipe:
  """Makes the recipe that a name stands for: a method and an allocation.

  A name is a method or a preset, followed by options, each after a colon:
  `keydiff:anchor=median_unit:recent_frac=0.1`. The values of a list are joined
  by plus signs: `key_norm:skip_layers=0+1`. Names of
  `kvjax.registry.wrappers.WRAPPERS` may be put before it: `pyramid/` spreads
  the budget over the layers and `ada/` over the heads, `rerotate/`, `chunked/`
  and `chunkkv.kvpress/` change what the method keeps. Their options follow
  their own name, or the last name: `pyramid:beta=10/keydiff` is
  `pyramid/keydiff:beta=10`. If several parts have an option of that name, it
  is then the method's. An option that names a file takes a path without colons,
  or an address: `ada/qfilters:filters=gs://bucket/filters.safetensors`.

  Raises:
    InputError: no such method, preset or option, or a value out of range.
  """
  path = name.strip().partition(":")[0]
  if path.endswith(".py"):
    raise unknown(path, ())
  before, last = split_prefixes(name.strip())
  names = [text.partition(":")[0] for text in before]
  if not WRAPPERS.keys() >= {*names}:
    load_plugins()  # They may be of installed packages.
  kinds = collections.Counter(
    text.partition(".")[0] for text in names if text in WRAPPERS
  )
  for kind, count in kinds.items():
    if count > 1:
      raise InputError(
        f"{kind} stands {count} times before a method; write it once."
      )
  base, *options = split_options(last)
  kind = base.partition("@")[0]
  if METHODS.find(kind) is None and RETRIEVALS.find(kind) is not None:
    raise InputError(
      f"{kind} retrieves keys, and here is the place of a method that evicts "
      "them, as in ctkvr/keydiff@0.5."
    )
  recipe = recipe_of(make_named(base, METHODS))
  # A prefix is put before the method as its options make it.
  known = options_of(recipe)
  own = [text for text in options if text.partition("=")[0] in known]
  recipe = _with_options(base, recipe, own)
  label = base
  for text, name in zip(reversed(before), reversed(names), strict=True):
    recipe = wrap(text, recipe, label)
    label = f"{name}/{label}"
  others = [text for text in options if text not in own]
  recipe = _with_options(label, recipe, others)
  inner = [name for name in names if not WRAPPERS[name].spreads]
  _check_even("/".join([*inner, base]), recipe)
  return recipe


def _with_options(label: str, recipe: Recipe, options: Sequence[str]) -> Recipe:
  """Changes options of a recipe, whose allocation follows its method's."""
  changed = with_options(label, recipe, options)
  if changed.allocation is None:
    return changed
  allocation = _follow(
    changed.allocation, recipe.method.allocation, changed.method.allocation
  )
  return dataclasses.replace(changed, allocation=allocation)


def _follow(spread: Allocation, old: Allocation, new: Allocation) -> Allocation:
  """An allocation, with another default of its method at its core."""
  if spread == old:
    return new
  parts = {f.name: getattr(spread, f.name) for f in dataclasses.fields(spread)}
  changes = {
    name: _follow(part, old, new)
    for name, part in parts.items()
    if isinstance(part, Allocation)
  }
  return dataclasses.replace(spread, **changes) if changes else spread


def _check_even(label: str, recipe: Recipe) -> None:
  """Refuses to spread a budget, as plans do, in the words of the name."""
  if recipe.allocation is None:
    return
  if reason := recipe.method.traits.even:
    raise InputError(
      f"The budget of {label} cannot be spread unevenly over layers or heads: "
      f"{reason}."
    )


def split_prefixes(name: str) -> tuple[list[str], str]:
  """Splits a name into its prefixes and the method with its options.

  A slash after the options of a method is part of a path.
  """
  before: list[str] = []
  while "/" in name:
    first, _, rest = name.partition("/")
    base, colon, _ = first.partition(":")
    # "chunkkv.kvpress" is the name of a method and of a prefix.
    if colon and base not in WRAPPERS and METHODS.find(base) is not None:
      break
    before.append(first)
    name = rest
  return before, name


def get_method(name: str) -> Method:
  """Makes the eviction method that a name stands for.

  A name is a method or a preset, followed by options, each after a colon:
  `keydiff:anchor=median_unit:recent_frac=0.1`. How a preset rounds a retention
  is no part of the method; `get_plan` knows it.

  Raises:
    InputError: no such method, preset or option, a value out of range, or a
      name that spreads a budget over layers or heads too.

  Examples:
    >>> import kvjax
    >>> kvjax.get_method("streaming:sinks=8")
    StreamingLLM(sinks=8, rerotate=False, recent_frac=0.0)
  """
  _check_name(name, "get_method", "keydiff")
  recipe = get_recipe(name)
  if recipe.allocation is not None:
    raise InputError(
      f"{name} is more than a method: it says how the budget is spread; "
      "kvjax.get_plan makes a plan of it."
    )
  return recipe.method


def get_retrieval(name: str) -> Retrieval:
  """Makes the retrieval method that a name stands for.

  A name is a method or a preset, followed by options, each after a colon:
  `ctkvr:choice=equi:update=false`, `quest:dense_layers=0+1`.

  Raises:
    InputError: no such method, preset or option, or a value out of range.

  Examples:
    >>> import kvjax
    >>> kvjax.get_retrieval("ctkvr:probes=8").probes
    8
  """
  _check_name(name, "get_retrieval", "quest")
  kind = name.strip().partition(":")[0]
  if RETRIEVALS.find(kind) is None and METHODS.find(kind) is not None:
    raise InputError(
      f"{kind} evicts tokens, and here is the place of a method that retrieves "
      f"keys, such as quest; kvjax.get_method makes {kind}."
    )
  return make_named(name.strip(), RETRIEVALS)


def get_plan(
  name: str,
  budget: float | Budget | PerLayer | Calibrated | Threshold,
  *,
  schedule: Schedule = WHOLE,
  per_query_head: bool = False,
  kv_dtype: str | None = None,
  decoding: Plan | None = None,
) -> Plan:
  """Makes the plan that the name of a method stands for.

  Args:
    name: name of an eviction method, as in `get_method`, possibly with prefixes
      such as `pyramid/`, which spreads the budget over the layers (see
      `kvjax.registry.names.get_recipe`); or of a retrieval method, as in
      `get_retrieval`. A retrieval method may be combined with an eviction
      method and its budget: `ctkvr/compactor@0.5` indexes the half that
      Compactor keeps, `flat/keydiff@256` the 256 tokens that KeyDiff keeps.
    budget: tokens that an eviction method keeps, or keys that a retrieval
      method retrieves per token, unless its name sets them (`ctkvr.512`). A
      float is a share (`Retention`) and an integer a number (`Tokens`): 1.0 is
      everything, and the integer 1 is refused, as it may be meant as a share.
      `Calibrated` and `Threshold` are for eviction methods only.
    schedule: when an eviction method evicts.
    per_query_head: see `Plan`.
    kv_dtype: see `Plan`; eviction methods only.
    decoding: see `Plan`; eviction methods only.

  Raises:
    InputError: the name stands for no method, or the method is not defined for
      the schedule, the budget or the dtype.

  Examples:
    >>> import kvjax
    >>> plan = kvjax.get_plan("keydiff", 0.25)
    >>> plan.method.anchor
    'mean_unit'
  """
  _check_name(
    name,
    "get_plan",
    "keydiff",
    "; give a method to kvjax.Plan(method, budget), and that plan to "
    "kvjax.models.Chat(lm, text, plan) for a chat",
  )
  name = name.strip()
  amount: _PlanBudget = as_budget(budget)
  sparse = None
  if _is_retrieval(name):
    first, slash, kept = name.partition("/")
    sparse = _sparse_attention(first, amount)
    recipe, amount = Recipe(FullKV()), Retention(1.0)
    if slash:
      kept_name, amount = split_budget(kept)
      recipe = get_recipe(kept_name)
  else:
    recipe = get_recipe(name)
  return Plan(
    recipe.method,
    _rounded(amount, recipe),
    schedule=schedule,
    per_query_head=per_query_head,
    sparse=sparse,
    kv_dtype=kv_dtype,
    allocation=recipe.allocation,
    decoding=decoding,
  )


def _is_retrieval(name: str) -> bool:
  """Whether the name of a plan begins with that of a retrieval method.

  Raises:
    InputError: it is the name of no method.
  """
  first, slash, kept = name.partition("/")
  base = first.partition(":")[0]
  # Prefixes of eviction methods end in a slash, too, and paths have any of
  # these signs.
  if (slash and base in WRAPPERS) or METHODS.find(base) is not None:
    return False
  # By now, the prefixes of installed packages are known as well.
  is_budgeted = "@" in kept and base not in WRAPPERS
  if is_budgeted or RETRIEVALS.find(base) is not None:
    return True
  if not slash:
    known = [*METHODS, *METHODS.presets, *RETRIEVALS, *RETRIEVALS.presets]
    raise unknown(base, known)
  return False


def _sparse_attention(name: str, amount: _PlanBudget) -> SparseAttention:
  """Makes the retrieval of a plan.

  Args:
    name: name of a retrieval method.
    amount: the keys that it retrieves, unless its name sets them.

  Raises:
    InputError: there is no such method, or the budget says what to evict.
  """
  retrieval = get_retrieval(name)
  if isinstance(amount, Calibrated):
    raise InputError(
      f"A calibration says what a context can lose; {name} loses nothing, so "
      "give it the number of keys to retrieve."
    )
  if isinstance(amount, Threshold):
    raise InputError(
      f"A threshold says what a method evicts; {name} evicts nothing, so give "
      "it the number of keys to retrieve."
    )
  if isinstance(amount, PerLayer):
    raise InputError(
      f"{name} retrieves as many keys in all layers; give one budget for all "
      "of them."
    )
  if retrieval.keys:
    amount = Tokens(retrieval.keys)
  return SparseAttention(retrieval, amount)


def _check_name(
  name: Any, function: str, example: str, advice: str = ""
) -> None:
  """Checks the type, for callers without a static type checker."""
  if not isinstance(name, str):
    raise InputError(
      f"kvjax.{function} takes a name such as {example!r}, not {name!r:.80}"
      f"{advice}."
    )


def _rounded(budget: _PlanBudget, recipe: Recipe) -> _PlanBudget:
  """The budget, with its retentions rounded as the recipe says."""
  rounding = recipe.rounding
  if rounding is None:
    return budget
  if isinstance(budget, PerLayer):
    return PerLayer(
      [_rounded_layer(layer, rounding) for layer in budget.layers]
    )
  if isinstance(budget, Calibrated):
    return dataclasses.replace(budget, rounding=rounding)
  if isinstance(budget, Threshold):
    return budget
  return _rounded_layer(budget, rounding)


def _rounded_layer(budget: Budget, rounding: Rounding) -> Budget:
  if isinstance(budget, Retention):
    return dataclasses.replace(budget, rounding=rounding)
  return budget


def split_budget(text: str) -> tuple[str, Budget]:
  """Splits a name with a budget, as in `compactor@0.5` or `keydiff@256`.

  Returns:
    The name, which may be of no method, and the budget.

  Raises:
    InputError: there is no budget, or it is out of range.
  """
  name, _, amount = text.rpartition("@")
  try:
    share: Budget = (
      Retention(float(amount)) if "." in amount else Tokens(int(amount))
    )
  except InputError:  # a ValueError, too
    raise
  except ValueError as error:
    raise InputError(
      "A method with its budget is written as compactor@0.5 or keydiff@256, "
      f"not {text!r}."
    ) from error
  return name, share
