"""Evaluation of a layer by the methods of several plans."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from kvjax.activations import Activations
from kvjax.engine.ahead import Call, compile_together
from kvjax.engine.compress import Evaluated, Evaluation, evaluate_layer
from kvjax.engine.layer_budgets import compresses
from kvjax.engine.plans import Plan
from kvjax.engine.prepared import PreparedPlan
from kvjax.model import Geometry

# Results of the evaluations of a layer, with the number of the layer that was
# evaluated.
Evaluations = Mapping[Evaluation, tuple[int, Evaluated]]


def list_evaluations(
  layer: int,
  plans: Sequence[Plan],
  prepared: Sequence[PreparedPlan | None],
  geometry: Geometry,
  measured: Collection[Evaluation] = (),
) -> Mapping[Evaluation, bool]:
  """Lists the evaluations of a layer, and whether each needs scores.

  Args:
    layer: index of the layer in the model.
    plans: the plans.
    prepared: the prepared plans; None for those whose budget is known later.
    geometry: sizes of the model.
    measured: evaluations whose scores are needed even if nothing is evicted.
  """
  requests: dict[Evaluation, bool] = {}
  for plan, ready in zip(plans, prepared, strict=True):
    evaluation = Evaluation.of(plan)
    evicts = ready is None or not ready.keeps_all[layer]
    scored = (evicts or evaluation in measured) and compresses(
      plan, geometry, layer
    )
    if scored or evaluation.observer is not None:
      requests[evaluation] = requests.get(evaluation, False) or scored
  return requests


def evaluate_all(
  layer: int,
  activations: Activations,
  requests: Mapping[Evaluation, bool],
  previous: Evaluations,
  *,
  first: bool = False,
) -> Evaluations:
  """Evaluates a layer, or reuses the evaluation of the layer it copies.

  Args:
    layer: index of the layer in the model.
    activations: activations of the prompt.
    requests: the evaluations, and whether each needs scores.
    previous: evaluations of the layers before.
    first: whether no layer of its kind was evaluated yet: programs are then
      compiled together.
  """
  copied = {
    evaluation: _copied(evaluation, layer, previous) for evaluation in requests
  }
  calls = {
    evaluation: Call(
      evaluate_layer,
      dict(
        layer=np.int32(layer),
        activations=activations.only(evaluation.method.traits.activations),
      ),
      dict(evaluation=evaluation, scored=scored and not copied[evaluation]),
    )
    for evaluation, scored in requests.items()
    # With an observer, this layer must still be observed.
    if not copied[evaluation] or evaluation.observer is not None
  }
  if first and len(calls) > 1:
    compile_together(calls.values())
  evaluations = {}
  for evaluation in requests:
    source = copied[evaluation]
    if evaluation not in calls:
      assert source is not None
      evaluations[evaluation] = source
      continue
    evaluated = calls[evaluation]()
    if source:
      # What is remembered for decoding is the layer's own.
      evaluated = dataclasses.replace(evaluated, scores=source[1].scores)
    number = evaluation.method.traits.source_layer(layer)
    evaluations[evaluation] = number, evaluated
  return evaluations


def _copied(
  evaluation: Evaluation, layer: int, previous: Evaluations
) -> tuple[int, Evaluated] | None:
  """The evaluation that a layer copies from an earlier one, if it does."""
  found = previous.get(evaluation)
  source = evaluation.method.traits.source_layer(layer)
  return found if found is not None and found[0] == source else None


def find_evaluated(plan: Plan, evaluations: Evaluations) -> Evaluated | None:
  """Returns the evaluation by a plan's method, if there is one."""
  return evaluations.get(Evaluation.of(plan), (0, None))[1]
