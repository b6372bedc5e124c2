"""One pass over whole prompts, from which many plans keep their caches.

The host calls one compiled program per layer for the forward pass, one per
method for its scores and one per plan to keep what it selects. Layers of one
kind share these programs, and so do sweeps with common methods or plans.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from kvjax.activations import Activations, NotProvidedError
from kvjax.cache.cache import Cache
from kvjax.calibration.features import Features
from kvjax.calibration.record import Calibrated
from kvjax.engine import prompt_programs
from kvjax.engine.building import CacheBuilder
from kvjax.engine.compress import Evaluation, shape_of_scores
from kvjax.engine.compression_plan import Plan
from kvjax.engine.deferred import Deferred, replay_of
from kvjax.engine.evaluate import (
  Evaluations,
  evaluate_all,
  find_evaluated,
  list_evaluations,
  load,
)
from kvjax.engine.prepared import PreparedPlan
from kvjax.engine.preparing import prepare, prepare_calibrated
from kvjax.engine.shared_budgets import HeadCounts
from kvjax.engine.thresholds import must_keep
from kvjax.hosts import read
from kvjax.labels import name_of
from kvjax.methods.traits import most_queries
from kvjax.model import Model
from kvjax.options.budgets import Threshold
from kvjax.prompts import Prompts

# Methods that read up to as many last queries share the programs of layers.
_QUERIES = 64
# What each retention of the grid recites, for plans that depend on it.
_Recitals = Sequence[Float[np.ndarray, "B R"] | None]
# r* of each row for plans with a `Calibrated` budget, None for other plans.
_Retentions = tuple[Float[np.ndarray, " B"] | None, ...]


class Measured(NamedTuple):
  """The result of a sweep, with the likelihood of the prompts.

  Attributes:
    caches: one cache for each plan.
    logits: logits after each row's last token.
    nll: NLL(c) of each row; see `kvjax.negative_log_likelihood`.
    features: what the prefill tells about each row, for each plan.
    retentions: r* of each row for plans with a `Calibrated` budget, None for
      other plans.
  """

  caches: tuple[Cache, ...]
  logits: Float[Array, "B V"]
  nll: Float[Array, " B"]
  features: tuple[Features, ...]
  retentions: tuple[Float[np.ndarray, " B"] | None, ...]


class Requested(NamedTuple):
  """The features to measure in a sweep.

  Attributes:
    likelihood: whether to compute likelihoods; if not, they are zeros.
    scores: evaluations the shape of whose scores is computed, in an order that
      all hosts of a mesh share.
  """

  likelihood: bool
  scores: tuple[Evaluation, ...]


def sweep_prompts(
  model: Model,
  params: PyTree,
  prompts: Prompts,
  plans: Sequence[Plan],
  requested: Requested,
  recitals: _Recitals = (),
) -> Measured:
  """Runs prompts once, keeps a cache for each plan, and measures features.

  Args:
    model: the functions.
    params: the weights.
    prompts: rows of unequal lengths, within the model's context.
    plans: one or more, for whole prompts and for this model; `kvjax.sweep`
      checks prompts and plans.
    requested: the features.
    recitals: `Features.recited` for each plan, or nothing.

  Returns:
    The caches, and the features.

  Raises:
    InputError: a prompt protects more tokens than are kept.
  """
  running = _Sweep(model, prompts, plans, requested)
  logits, nll = running.forward(params)
  running.replay(params)
  features, retentions = running.measure(nll, recitals)
  running.keep_deferred(retentions)
  return Measured(running.caches(), logits, nll[0], features, retentions)


class _Sweep:
  """The caches of many plans, while prompts pass through the layers."""

  def __init__(
    self,
    model: Model,
    prompts: Prompts,
    plans: Sequence[Plan],
    requested: Requested,
  ) -> None:
    """Starts before the first layer; see `sweep_prompts`."""
    self._model, self._prompts, self._plans = model, prompts, plans
    self._requested = requested
    self._lengths = jnp.asarray(prompts.lengths, jnp.int32)
    mask = prompts.protected
    self._protected = None if mask is None else jnp.asarray(mask)
    self._prepared = [
      None if plan.adapts else prepare(plan, prompts, model.geometry)
      for plan in plans
    ]
    # By the plans' indices. Others follow when what they wait for is known.
    self._builders = {
      index: CacheBuilder(model, ready, self._protected)
      for index, ready in enumerate(self._prepared)
      if ready is not None and not ready.waits
    }
    self._waiting = [n for n in range(len(plans)) if n not in self._builders]
    self._deferred = Deferred([plans[index] for index in self._waiting])
    self._loaded = load(dict.fromkeys(map(Evaluation.of, plans)))
    self._latest: Evaluations = {}
    self._shapes: dict[Evaluation, list[Float[Array, "3 B"]]] = {
      evaluation: [] for evaluation in requested.scores
    }

  def forward(
    self, params: PyTree
  ) -> tuple[Float[Array, "B V"], Float[Array, "2 B"]]:
    """Runs all layers, and compresses each by the plans that wait for nothing.

    Returns:
      The logits after each row's last token, and the likelihoods.
    """
    optional = frozenset[str]().union(*(e.activations for e in self._loaded))
    layers = prompt_programs.forward_layers(
      self._model, params, self._prompts, optional, self._queries()
    )
    try:
      # The next layer donates `hidden`: these states are gone after that.
      for layer, (hidden, activations) in enumerate(layers):
        if activations is not None:
          self._compress(layer, activations)
          _wait_for(hidden)
    except NotProvidedError as error:
      raise self._of_method(error) from error
    return prompt_programs.head(
      params,
      hidden,
      jnp.asarray(self._prompts.tokens),
      self._lengths,
      model=self._model,
      measured=self._requested.likelihood,
    )

  def _of_method(self, error: NotProvidedError) -> NotProvidedError:
    """Names the first method that reads what the model does not provide."""
    missing = {*error.names}
    for evaluation in self._loaded:
      if names := sorted(missing & evaluation.activations):
        return NotProvidedError(names, name_of(evaluation.method))
    return error

  def _queries(self) -> int | None:
    """How many last queries of the prompts are read; None for all."""
    length = self._prompts.tokens.shape[1]
    most = most_queries(
      [
        *(evaluation.queries for evaluation in self._loaded),
        *(_stored_queries(plan, length) for plan in self._plans),
      ]
    )
    return None if most is None else -(-most // _QUERIES) * _QUERIES

  def _compress(self, layer: int, activations: Activations) -> None:
    """Evaluates a layer, keeps what is selected, and stores what waits."""
    requests = list_evaluations(
      layer,
      self._plans,
      self._prepared,
      self._model.geometry,
      self._requested.scores,
    )
    later = {e: scored for e, scored in requests.items() if replay_of(e)}
    now = {e: requests[e] for e in requests if e not in later}
    evaluations = evaluate_all(
      layer, activations, now, self._loaded, self._latest
    )
    # A layer may copy a selection across layers that evict nothing.
    self._latest = {**self._latest, **evaluations}
    self._add_shapes(activations, evaluations)
    bare = activations.only(())
    lean = bare.with_queries(0)
    for index, builder in self._builders.items():
      plan = self._plans[index]
      evaluated = find_evaluated(plan, evaluations)
      kept = bare if plan.stores_by_queries else lean
      builder.keep(layer, kept, evaluated)
    # Scores are computed, so optional activations are no longer needed.
    self._deferred.add(layer, activations, later, evaluations)

  def replay(self, params: PyTree) -> None:
    """Replays the prompts, for methods that score by a replay."""
    layers = self._deferred.replay(
      self._model, params, self._prompts, self._loaded
    )
    for activations, evaluations in layers:
      self._add_shapes(activations, evaluations)

  def _add_shapes(
    self, activations: Activations, evaluations: Evaluations
  ) -> None:
    """Adds the shape of the scores of a layer."""
    for evaluation, found in self._shapes.items():
      if evaluation in evaluations and evaluations[evaluation][1].has_scores:
        evaluated = evaluations[evaluation][1]
        found.append(
          shape_of_scores(
            self._loaded[evaluation].known_as, activations.only(()), evaluated
          )
        )

  def measure(
    self, nll: Float[Array, "2 B"], recitals: _Recitals
  ) -> tuple[tuple[Features, ...], _Retentions]:
    """Finds the features, if requested, and the calibrated retentions."""
    if not self._requested.likelihood:
      return (), (None,) * len(self._plans)
    recitals = recitals or (None,) * len(self._plans)
    features = tuple(
      found._replace(recited=recited)
      for found, recited in zip(self._features(nll), recitals, strict=True)
    )
    retentions = tuple(
      plan.budget.retentions(of_plan)
      if isinstance(plan.budget, Calibrated)
      else None
      for plan, of_plan in zip(self._plans, features, strict=True)
    )
    return features, retentions

  def _features(self, nll: Float[Array, "2 B"]) -> tuple[Features, ...]:
    """Collects the features for each plan, on the host.

    Those of scores are means over the layers that a method scores.
    """
    # One transfer, after the whole pass.
    (of_prompts, of_tails), by_layer = read((nll, list(self._shapes.values())))
    means = {
      evaluation: np.mean(values, axis=0)
      for evaluation, values in zip(self._shapes, by_layer, strict=True)
      if values
    }
    lengths = self._prompts.known_lengths
    return tuple(
      Features(
        of_prompts, lengths, of_tails, *means.get(Evaluation.of(plan), ())
      )
      for plan in self._plans
    )

  def keep_deferred(self, retentions: _Retentions) -> None:
    """Makes the caches of the plans that waited for all layers."""
    plans, prompts, geometry = self._plans, self._prompts, self._model.geometry
    by_threshold = self._deferred.prepare_thresholds(plans, prompts, geometry)
    late: list[tuple[Plan, CacheBuilder, HeadCounts]] = []
    for index in self._waiting:
      plan, kept = plans[index], self._protected
      if isinstance(plan.budget, Threshold):
        kept = jnp.asarray(must_keep(plan.budget, prompts))
        ready, counts = by_threshold[index]
      else:
        ready, counts = self._deferred.count_by_head(
          self._ready(index, retentions), kept, geometry
        )
      self._builders[index] = CacheBuilder(self._model, ready, kept)
      late.append((plan, self._builders[index], counts))
    self._deferred.keep(late)

  def _ready(self, index: int, retentions: _Retentions) -> PreparedPlan:
    """The prepared plan, by its calibrated retentions if it has them."""
    plan, shares = self._plans[index], retentions[index]
    if shares is not None:
      return prepare_calibrated(
        plan, shares, self._prompts, self._model.geometry
      )
    ready = self._prepared[index]
    assert ready is not None
    return ready

  def caches(self) -> tuple[Cache, ...]:
    """The cache of every plan."""
    return tuple(
      self._builders[index].cache(self._lengths)
      for index in range(len(self._plans))
    )


def _wait_for(hidden: Float[Array, "B S E"]) -> None:
  """Blocks the host until a layer's forward pass has been computed.

  The device still compresses the layer then, so that it does not idle. Without
  this, the host would run ahead and allocate activations of many layers.
  """
  if not isinstance(hidden, jax.core.Tracer):
    hidden.block_until_ready()


def _stored_queries(plan: Plan, length: int) -> int | None:
  """How many last queries an index or channels depend on; None for all.

  Args:
    plan: the plan.
    length: S, length of the padded prompts.
  """
  if plan.sparse is not None:
    # The last one counts what a token retrieves.
    return most_queries((1, plan.sparse.retrieval.num_queries(length)))
  return plan.method.traits.queries if plan.stores_by_queries else 0
