"""Methods and plans by name, for eviction and retrieval alike."""

import dataclasses
from collections.abc import Callable, Mapping

from kvjax.allocation.adaptive import Adaptive
from kvjax.allocation.base import Allocation
from kvjax.allocation.pyramid import Pyramid
from kvjax.calibration.record import Calibrated
from kvjax.engine.plans import Plan
from kvjax.errors import InputError
from kvjax.methods.base import Method
from kvjax.methods.full import FullKV
from kvjax.options.budgets import Budget, Retention, Tokens
from kvjax.options.schedules import WHOLE, Schedule
from kvjax.registry.naming import named, near, with_options
from kvjax.registry.registry import METHODS, RETRIEVALS, Recipe, recipe_of
from kvjax.retrieval.base import Retrieval
from kvjax.retrieval.sparse_attention import SparseAttention

# In front of a name they spread its budget over layers or heads.
_PREFIXES: Mapping[str, Callable[[Method, Allocation], Allocation]] = {
  "pyramid": lambda method, over: Pyramid(over, method.traits.protects),
  "ada": lambda method, over: Adaptive(over),
}


def get_recipe(name: str) -> Recipe:
  """The method that a name stands for, and how it spreads its budget.

  A name is a method or a preset, then its options, each after a colon:
  `keydiff:anchor=median_unit:recent_frac=0.1`. The values of a list are joined
  by plus signs: `key_norm:skip_layers=0+1`. In front, `pyramid/` spreads the
  budget over the layers and `ada/` over the heads, and have options too:
  `pyramid/keydiff:beta=10`, `pyramid/ada/snapkv:alpha=0.1`.

  Raises:
    InputError: no such method, preset or option, or a value out of range.
  """
  name = name.strip()
  prefix, slash, rest = name.partition("/")
  if not slash:
    plain = recipe_of(named(name.partition(":")[0], METHODS))
    return _fitted(recipe_of(named(name, METHODS)), plain.method.allocation)
  if prefix not in _PREFIXES:
    raise InputError(
      f"There is no {prefix!r} to put before a method"
      f"{near(prefix, _PREFIXES)}; there are {', '.join(_PREFIXES)}."
    )
  base, *options = rest.split(":")
  inner = get_recipe(base)
  method = inner.method
  _check_prefix(prefix, inner)
  over = inner.allocation or method.allocation
  recipe = Recipe(method, _PREFIXES[prefix](method, over))
  made: Recipe = with_options(name.partition(":")[0], recipe, options)
  return _fitted(made, method.allocation)


def _fitted(recipe: Recipe, before: Allocation) -> Recipe:
  """A recipe that spreads its budget by what its method has become.

  Args:
    recipe: with the options that its name gives.
    before: the method's own law without them.
  """
  method = recipe.method

  def fitted(law: Allocation) -> Allocation:
    if isinstance(law, Pyramid):
      window = method.traits.protects
      return dataclasses.replace(law, over=fitted(law.over), window=window)
    if isinstance(law, Adaptive):
      return dataclasses.replace(law, over=fitted(law.over))
    return method.allocation if law == before else law

  if recipe.allocation is None:
    return recipe
  return dataclasses.replace(recipe, allocation=fitted(recipe.allocation))


def _check_prefix(prefix: str, inner: Recipe) -> None:
  """Refuses to spread what cannot be spread, or is spread already."""
  name = type(inner.method).__name__
  over = inner.allocation
  if isinstance(over, Pyramid):
    raise InputError(
      f"The budget of {name} cannot be spread unevenly over layers or heads: "
      "its layers have their shares; write pyramid/ada/NAME for both."
    )
  if prefix == "ada" and (over or inner.method.allocation).ragged:
    raise InputError(
      f"The heads of {name} have unequal shares already; give ada/ a method "
      "whose heads keep as many."
    )


def get_method(name: str) -> Method:
  """The eviction method that a name stands for; see `get_recipe`.

  Raises:
    InputError: no such method, preset or option, a value out of range, or a
      name that spreads a budget over layers or heads too.
  """
  recipe = get_recipe(name)
  if recipe.allocation is not None:
    raise InputError(
      f"{name} is more than a method: it says how the budget is spread; "
      "kvjax.get_plan makes a plan of it."
    )
  return recipe.method


def get_retrieval(name: str) -> Retrieval:
  """The retrieval method that a name stands for.

  A name is a method or a preset, then its options, each after a colon:
  `ctkvr:choice=equi:update=false`, `quest:dense_layers=0+1`.

  Raises:
    InputError: no such method, preset or option, or a value out of range.
  """
  made: Retrieval = named(name.strip(), RETRIEVALS)
  return made


def get_plan(
  name: str,
  budget: Budget | Calibrated,
  schedule: Schedule = WHOLE,
  per_query_head: bool = False,
  kv_dtype: str | None = None,
) -> Plan:
  """The plan that the name of a method stands for at a budget.

  Args:
    name: as `get_recipe` and `get_retrieval` read it. A retrieval method may
      be followed by what is kept in the first place, and how much of it:
      `ctkvr/compactor@0.5` indexes the half that Compactor keeps,
      `flat/keydiff@256` the 256 tokens of KeyDiff.
    budget: what an eviction method may keep, or how many keys a retrieval
      method looks up per token, if it does not say so itself (`ctkvr.512`);
      `Calibrated` is for eviction methods.
    schedule: when an eviction method evicts.
    per_query_head: see `Plan`.
    kv_dtype: see `Plan`; eviction methods only.

  Raises:
    InputError: the name stands for no method, or the method is not defined for
      the schedule, the budget or the dtype.

  Example:
    >>> plan = get_plan("keydiff", Retention(0.25))
    >>> plan.method.anchor
    'mean_unit'
  """
  name = name.strip()
  first, slash, kept = name.partition("/")
  base = first.partition(":")[0]
  looks_up = "@" in kept or base in {*RETRIEVALS, *RETRIEVALS.presets}
  if not looks_up:
    if not slash and base not in {*METHODS, *METHODS.presets}:
      _refuse(base)
    recipe = get_recipe(name)
    return Plan(
      recipe.method,
      budget,
      schedule,
      per_query_head,
      kv_dtype=kv_dtype,
      allocation=recipe.allocation,
    )
  retrieval = get_retrieval(first)
  if isinstance(budget, Calibrated):
    raise InputError(
      f"A calibration says what a context can lose; {first} loses nothing, so "
      "give it the number of keys to look up."
    )
  if retrieval.reads:
    budget = Tokens(retrieval.reads)
  recipe, share = _kept(kept) if slash else (Recipe(FullKV()), Retention(1.0))
  return Plan(
    recipe.method,
    share,
    schedule,
    per_query_head,
    SparseAttention(retrieval, budget),
    kv_dtype,
    recipe.allocation,
  )


def _refuse(base: str) -> None:
  """Names all that might have been meant."""
  known = [*METHODS, *METHODS.presets, *RETRIEVALS, *RETRIEVALS.presets]
  raise InputError(
    f"There is no method {base!r}{near(base, known)}; the methods are "
    f"{', '.join([*METHODS, *RETRIEVALS])}."
  )


def _kept(text: str) -> tuple[Recipe, Budget]:
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
  return get_recipe(name), share
