"""Evaluation of a layer by the methods of several plans."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, PyTree

from kvjax.activations import Activations
from kvjax.cache.sharding import replicate
from kvjax.engine.compress import Evaluated, Evaluation, evaluate_layer
from kvjax.engine.compression_plan import Plan
from kvjax.engine.layer_budgets import compresses
from kvjax.engine.prepared import PreparedPlan
from kvjax.model import Geometry

# Results of the evaluations of a layer, with the number of the layer that was
# evaluated.
Evaluations = Mapping[Evaluation, tuple[int, Evaluated]]


class Loaded(NamedTuple):
  """An evaluation as compiled programs take it.

  Attributes:
    known_as: the evaluation without the names of files.
    weights: what the method's files have.
    observer_weights: what the observer's files have, if it reads activations.
  """

  known_as: Evaluation
  weights: PyTree[Array]
  observer_weights: PyTree[Array]


def load(evaluations: Iterable[Evaluation]) -> Mapping[Evaluation, Loaded]:
  """Reads what the methods of evaluations have in files, for all layers."""
  return {each: _load(each) for each in evaluations}


def _load(evaluation: Evaluation) -> Loaded:
  """Reads what the methods of an evaluation have in files."""
  observer = evaluation.observer
  weights = replicate(evaluation.method.load())
  if evaluation.goes_on:
    observed = weights
  elif observer is not None and observer.traits.observes:
    observed = replicate(observer.load())
  else:
    observed = None
  return Loaded(evaluation.without_files(), weights, observed)


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
    scored = compresses(plan, geometry, layer) and (
      evaluation in measured or _evicts(plan, ready, layer)
    )
    if scored or evaluation.observer is not None:
      requests[evaluation] = requests.get(evaluation, False) or scored
  return requests


def _evicts(plan: Plan, ready: PreparedPlan | None, layer: int) -> bool:
  """Whether a layer, or a later one that copies its selection, evicts."""
  if ready is None:
    return True
  traits = plan.method.traits
  end = traits.source_layer(layer) + traits.reuse
  return not all(ready.keeps_all[layer:end])


def evaluate_all(
  layer: int,
  activations: Activations,
  requests: Mapping[Evaluation, bool],
  loaded: Mapping[Evaluation, Loaded],
  previous: Evaluations,
) -> Evaluations:
  """Evaluates a layer, or reuses the evaluation of the layer it copies.

  Args:
    layer: index of the layer in the model.
    activations: its activations.
    requests: the evaluations, and whether each needs scores.
    loaded: what these have in files.
    previous: evaluations of earlier layers.
  """
  evaluations = {}
  for evaluation, scored in requests.items():
    traits, observer = evaluation.method.traits, evaluation.observer
    source = traits.source_layer(layer)
    of, latest = previous.get(evaluation, (None, None))
    # A layer with a window has only been observed.
    copies = of == source and latest is not None and latest.has_scores
    # With an observer, this layer must still be observed.
    if copies and observer is None:
      evaluations[evaluation] = previous[evaluation]
      continue
    known_as, weights, observer_weights = loaded[evaluation]
    seen = activations.only(evaluation.activations)
    if evaluation.queries == 0:
      seen = seen.with_queries(0)
    if weights is not None:
      evaluation.method.check_activations(seen)
    if observer is not None and observer_weights is not None:
      observer.check_activations(seen)
    evaluated = evaluate_layer(
      known_as,
      np.int32(layer),
      dataclasses.replace(seen, weights=weights),
      observer_weights,
      scored=scored and not copies,
    )
    if copies:
      # What is remembered for decoding is the layer's own.
      scores = previous[evaluation][1].scores
      evaluated = dataclasses.replace(evaluated, scores=scores)
    evaluations[evaluation] = source, evaluated
  return evaluations


def find_evaluated(plan: Plan, evaluations: Evaluations) -> Evaluated | None:
  """Returns the evaluation by a plan's method, if there is one."""
  return evaluations.get(Evaluation.of(plan), (0, None))[1]
