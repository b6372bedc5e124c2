"""The budgets of the layers of a model."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.allocation.base import Allocation, Sizes
from kvjax.engine.compression_plan import Plan
from kvjax.engine.plan_conflicts import check_target
from kvjax.errors import InputError
from kvjax.model import Geometry, LayerSpec
from kvjax.options.budgets import Budget, PerLayer, Retention
from kvjax.prompts import Prompts


def layer_budgets(plan: Plan, geometry: Geometry) -> list[Budget]:
  """The budgets of the layers that methods compress; one if all are equal.

  Raises:
    InputError: the plan's budget has another number of layers than the model.
  """
  budget, layers = plan.budget, geometry.layers
  if not isinstance(budget, PerLayer):
    return [plan.fixed_budget]
  if len(budget.layers) != len(layers):
    raise InputError(
      f"The budget lists {len(budget.layers)} layers and the model has "
      f"{len(layers)}; give one budget for each."
    )
  pairs = zip(budget.layers, layers, strict=True)
  compressed = [budget for budget, spec in pairs if spec.compressible]
  return compressed or [budget.layers[0]]


def by_layer(
  budgets: Sequence[Budget], law: Callable[[Budget], Int[np.ndarray, "C *n"]]
) -> Int[np.ndarray, "C *n"]:
  """Applies a law of an allocation to the budget of each of C layers.

  Args:
    budgets: as `layer_budgets` returns them.
    law: from a budget to a number, or several, for each layer.
  """
  if len(budgets) == 1:
    return law(budgets[0])
  # A law counts for all layers at once; each layer takes its row of that.
  spread = {budget: law(budget) for budget in dict.fromkeys(budgets)}
  rows = [spread[budget][layer] for layer, budget in enumerate(budgets)]
  return np.array(rows, np.int32)


def check_counts(
  allocation: Allocation, counts: Any, layers: int, rows: int, *, even: bool
) -> None:
  """Refuses counts of an allocation that no cache can keep.

  Args:
    allocation: the allocation.
    counts: what it counted.
    layers: number of layers.
    rows: number of rows.
    even: whether it was given the same budget for all layers.

  Raises:
    InputError: they are no integers by layer and row, or below zero, or differ
      between layers though the allocation does not say so.
  """
  try:
    found = np.asarray(counts)
  except ValueError:
    found = np.asarray(None)
  fits = found.shape == (layers, rows) and found.dtype.kind in "iu"
  if not fits or np.any(found < 0):
    raise InputError(
      f"{type(allocation).__name__}.counts gives each of {layers} layers and "
      f"{rows} rows a number of tokens, 0 or more; it gave {counts!r:.80}."
    )
  if even and not allocation.spreads_layers and np.any(found != found[:1]):
    raise InputError(
      f"{type(allocation).__name__} counts differently for different layers; "
      "its property spreads_layers must be True."
    )


def kv_heads(plan: Plan, spec: LayerSpec) -> int:
  """Number of heads that store keys and values in a plan's cache."""
  return spec.heads if plan.per_query_head else spec.kv_heads


def compresses(plan: Plan, geometry: Geometry, layer: int) -> bool:
  """Whether the plan's method evicts from a layer."""
  keeps = plan.method.traits.keeps_layer(layer)
  return geometry.layers[layer].compressible and not keeps


def compressed_layers(plan: Plan, geometry: Geometry) -> tuple[bool, ...]:
  """For each layer, whether the plan's method evicts from it."""
  layers = range(geometry.num_layers)
  return tuple(compresses(plan, geometry, layer) for layer in layers)


def budget_sizes(plan: Plan, geometry: Geometry) -> Sizes:
  """The layers that share a budget, their heads and what these keep."""
  return Sizes(
    tuple(kv_heads(plan, s) for s in geometry.layers if s.compressible),
    plan.method.traits.protects,
  )


def check_always_kept(plan: Plan, prompts: Prompts, geometry: Geometry) -> None:
  """Refuses prompts of which less is kept than what is never evicted.

  Raises:
    InputError: see `Allocation.check_protected` and `check_target`.
  """
  if plan.decoding is not None:
    check_always_kept(plan.decoding, prompts, geometry)
  sizes = budget_sizes(plan, geometry)
  if plan.method.traits.keeps_all or not sizes.layers:
    return
  budgets = dict.fromkeys(layer_budgets(plan, geometry))
  if plan.schedule.every is not None:
    for budget in budgets:
      _check_targets(plan, budget, prompts)
  if prompts.protected is None:
    return
  rows = zip(prompts.protected, prompts.known_lengths, strict=True)
  for protected, length in rows:
    for budget in budgets:
      plan.spread.check_protected(
        protected[:length],
        budget,
        sizes,
        repeated=not plan.schedule.is_whole_prompt,
      )


def _check_targets(plan: Plan, budget: Budget, prompts: Prompts) -> None:
  """Refuses shares of prompts to which no eviction while decoding can get."""
  if not isinstance(budget, Retention) or budget.share == 1:
    return
  for length in prompts.known_lengths:
    check_target(plan.name, plan.method.traits, budget.num_kept(int(length)))
