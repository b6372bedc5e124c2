"""Layers whose caches are made after the forward pass."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jaxtyping import Array, Bool, PyTree

from kvjax.activations import Activations
from kvjax.engine.building import CacheBuilder
from kvjax.engine.compress import Evaluated, Evaluation
from kvjax.engine.compression_plan import Plan
from kvjax.engine.evaluate import (
  Evaluations,
  Loaded,
  evaluate_all,
  find_evaluated,
)
from kvjax.engine.layer_budgets import compressed_layers
from kvjax.engine.prepared import PreparedPlan
from kvjax.engine.replay import Replayed, replay_prompts
from kvjax.engine.shared_budgets import HeadCounts, count_by_head
from kvjax.engine.thresholds import count_reaching, prepare_threshold
from kvjax.hosts import read
from kvjax.methods.replay import Replay
from kvjax.model import Geometry, Model
from kvjax.options.budgets import Threshold
from kvjax.prompts import Prompts


@dataclasses.dataclass
class DeferredLayer:
  """A layer of the prompt that some plans wait for.

  Attributes:
    activations: keys, values and what methods read after a replay.
    requests: evaluations that wait for the replay, and whether they need
      scores.
    evaluations: evaluations so far.
  """

  activations: Activations
  requests: Mapping[Evaluation, bool]
  evaluations: Evaluations


class Deferred:
  """The layers of a prompt, in order, for the plans that wait for all of them.

  A plan waits if its budget is calibrated or a threshold, if its method replays
  the prompt or joins the scores of all layers, or if their heads share its
  budget.
  """

  def __init__(self, plans: Sequence[Plan]) -> None:
    """Starts without any layer.

    Args:
      plans: the plans that wait.
    """
    self._waits = bool(plans)
    replaying = [plan for plan in plans if plan.method.traits.replay]
    evaluations = map(Evaluation.of, replaying)
    self._names = frozenset[str]().union(*(e.activations for e in evaluations))
    # Queries are most of a layer. What is remembered after a replay depends on
    # them, and so do indices and channels of what is kept.
    self._queries = any(plan.while_decoding for plan in replaying) or any(
      plan.stores_by_queries for plan in plans
    )
    self._layers: dict[int, DeferredLayer] = {}

  def add(
    self,
    layer: int,
    activations: Activations,
    requests: Mapping[Evaluation, bool],
    evaluations: Evaluations,
  ) -> None:
    """Stores a layer, if any plan waits; see `DeferredLayer`."""
    if not self._waits:
      return
    activations = activations.only(self._names)
    if not self._queries:
      activations = activations.with_queries(0)
    self._layers[layer] = DeferredLayer(activations, requests, evaluations)

  def replay(
    self,
    model: Model,
    params: PyTree,
    prompts: Prompts,
    loaded: Mapping[Evaluation, Loaded],
  ) -> Iterator[tuple[Activations, Evaluations]]:
    """Replays the prompts and evaluates all layers that wait for it.

    Args:
      model: the functions.
      params: the weights.
      prompts: the prompts.
      loaded: what the evaluations have in files.

    Yields:
      Each layer's activations and its new evaluations.
    """
    replays = dict.fromkeys(
      replay
      for layer in self._layers.values()
      for evaluation, scored in layer.requests.items()
      if scored and (replay := replay_of(evaluation))
    )
    layers = {n: x.activations.only(()) for n, x in self._layers.items()}
    found: Mapping[int, Replayed] = {}
    if replays:
      found = replay_prompts(model, params, prompts, layers, tuple(replays))
    latest: Evaluations = {}
    for number, layer in self._layers.items():
      new: Evaluations = {}
      for evaluation, scored in layer.requests.items():
        replay = replay_of(evaluation)
        assert replay is not None
        replayed = found.get(number, {}).get(replay)
        seen = dataclasses.replace(layer.activations, replayed=replayed)
        one = evaluate_all(number, seen, {evaluation: scored}, loaded, latest)
        new = {**new, **one}
      latest = {**latest, **new}
      layer.evaluations = {**layer.evaluations, **new}
      yield layer.activations, new

  def count_by_head(
    self,
    prepared: PreparedPlan,
    protected: Bool[Array, "B P"] | None,
    geometry: Geometry,
  ) -> tuple[PreparedPlan, HeadCounts]:
    """Shares out the budget of a plan over the layers that it compresses.

    If its heads have their counts already, there is nothing to do.
    """
    if not prepared.plan.spread.whole_model or all(prepared.keeps_all):
      return prepared, {}
    activations, scores = self._scored(prepared.plan, prepared.compressed)
    return count_by_head(prepared, activations, scores, protected, geometry)

  def prepare_thresholds(
    self, plans: Sequence[Plan], prompts: Prompts, geometry: Geometry
  ) -> dict[int, tuple[PreparedPlan, HeadCounts]]:
    """Counts what reaches the thresholds of plans, by the plans' indices."""
    counts = {
      index: count_reaching(
        plan, prompts, *self._scored(plan, compressed_layers(plan, geometry))
      )
      for index, plan in enumerate(plans)
      if isinstance(plan.budget, Threshold)
    }
    # One transfer, as the sizes of the caches depend on it.
    on_host = read(counts)
    ready = {
      index: prepare_threshold(plans[index], prompts, geometry, of_plan)
      for index, of_plan in on_host.items()
    }
    return {
      index: (prepared, {} if all(prepared.keeps_all) else counts[index])
      for index, prepared in ready.items()
    }

  def _scored(
    self, plan: Plan, compressed: Sequence[bool]
  ) -> tuple[dict[int, Activations], dict[int, Array]]:
    """Activations and scores of the layers that a plan compresses."""
    activations, scores = {}, {}
    for number, layer in self._layers.items():
      evaluated = find_evaluated(plan, layer.evaluations)
      if compressed[number] and evaluated is not None:
        activations[number] = layer.activations.only(())
        scores[number] = evaluated.scores
    return activations, scores

  def keep(
    self, waiting: Sequence[tuple[Plan, CacheBuilder, HeadCounts]]
  ) -> None:
    """Compresses all layers; each is freed as soon as its caches are made."""
    for plan, builder, _ in waiting:
      if plan.method.traits.joins_layers:
        builder.join(self._with_scores(plan))
    for number in list(self._layers):
      layer = self._layers.pop(number)
      activations = layer.activations.only(())
      for plan, builder, counts in waiting:
        builder.keep(
          number,
          activations,
          find_evaluated(plan, layer.evaluations),
          counts.get(number),
        )

  def _with_scores(
    self, plan: Plan
  ) -> dict[int, tuple[Activations, Evaluated]]:
    """Activations and evaluations of the layers that have scores."""
    found = {
      number: (layer.activations.only(()), evaluated)
      for number, layer in self._layers.items()
      if (evaluated := find_evaluated(plan, layer.evaluations)) is not None
    }
    return {n: each for n, each in found.items() if each[1].has_scores}


def replay_of(evaluation: Evaluation) -> Replay | None:
  """The replay that a method needs, if any."""
  return evaluation.method.traits.replay
