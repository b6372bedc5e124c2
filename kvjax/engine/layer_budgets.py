"""The budgets of the layers of a model."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from kvjax.engine.plans import Plan
from kvjax.errors import InputError
from kvjax.model import Geometry
from kvjax.options.budgets import Budget, PerLayer


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
  compressed = [own for own, spec in pairs if spec.compressible]
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
  spread = {budget: law(budget) for budget in dict.fromkeys(budgets)}
  rows = [spread[budget][layer] for layer, budget in enumerate(budgets)]
  return np.array(rows, np.int32)
