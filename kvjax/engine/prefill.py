"""Prefill of whole prompts: one forward pass, compressed layer by layer.

The host calls one compiled program per layer for the forward pass, one per
method for its scores and one per plan to keep what it selects. Layers of one
kind share these programs, and so do sweeps with common methods or plans.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from kvjax.activations import Activations
from kvjax.cache.cache import Cache
from kvjax.calibration.features import OF_SCORES, Features
from kvjax.calibration.record import Calibrated
from kvjax.engine import prompt_programs
from kvjax.engine.blocks import prefill_blocks
from kvjax.engine.building import CacheBuilder
from kvjax.engine.compress import Evaluation, shape_of_scores
from kvjax.engine.deferred import Deferred, replay_of
from kvjax.engine.evaluate import (
  Evaluations,
  evaluate_all,
  find_evaluated,
  list_evaluations,
)
from kvjax.engine.layer_budgets import (
  check_protected,
)
from kvjax.engine.model_layers import layer_stacks
from kvjax.engine.plan_fit import check_context_axis, check_plan
from kvjax.engine.plans import Plan
from kvjax.engine.prepared import (
  max_span,
  prepare,
  prepare_calibrated,
)
from kvjax.engine.thresholds import must_keep
from kvjax.engine.whole_model import HeadCounts
from kvjax.errors import InputError
from kvjax.hosts import read
from kvjax.model import Model, check_context, check_tokens
from kvjax.options.budgets import Threshold
from kvjax.prompts import Prompts


def prefill(
  model: Model, params: PyTree, prompts: Prompts, plan: Plan
) -> tuple[Cache, Float[Array, "B V"]]:
  """Runs prompts and keeps the tokens of each layer that the method selects.

  With whole prompts, a layer's full keys and values exist only until the layer
  is done; in blocks they never exist. With a `Calibrated` budget or a
  `Threshold`, those of all layers and the method's scores exist until the end
  of the forward pass, when the budget is known.

  Args:
    model: the functions.
    params: the weights.
    prompts: rows of unequal lengths; the result of a row does not depend on the
      other rows.
    plan: what to keep, how much, and when to evict.

  Returns:
    The compressed cache, and the logits after each row's last token. With whole
    prompts, the logits are those of the uncompressed model; with blocks, each
    block attended to the compressed cache.

  Raises:
    InputError: a prompt is longer than the model's context or protects more
      tokens than are kept, or the method rerotates keys and the model cannot.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
    >>> plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
    >>> cache, logits = kvjax.prefill(model, params, prompts, plan)
    >>> cache.lengths[0].tolist()  # of the first layer, per row and KV head
    [[3, 3], [2, 2]]
  """
  if plan.schedule.block is None:
    (cache,), logits = sweep(model, params, prompts, [plan])
    return cache, logits
  # Either may be the larger one.
  block = max(plan.schedule.block, plan.schedule.first or 0)
  check_context(model, max_span(plan, np.asarray(prompts.lengths), block))
  check_tokens(model, prompts.tokens, np.asarray(prompts.lengths))
  check_plan(model, plan)
  check_context_axis(model, plan, prompts.tokens.shape[1])
  check_protected(plan, prompts, model.geometry)
  return prefill_blocks(model, params, prompts, plan)


def sweep(
  model: Model, params: PyTree, prompts: Prompts, plans: Sequence[Plan]
) -> tuple[tuple[Cache, ...], Float[Array, "B V"]]:
  """Runs prompts once and keeps a cache for each of many plans.

  A method's scores are computed once, however many budgets it is given.

  Args:
    model: the functions.
    params: the weights.
    prompts: rows of unequal lengths.
    plans: methods and budgets, for whole prompts.

  Returns:
    One cache for each plan, and the logits after each row's last token.

  Raises:
    InputError: a prompt is longer than the model's context, there is no plan,
      or one works in blocks, which needs its own forward pass.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
    >>> plans = [kvjax.get_plan("keydiff", kvjax.Tokens(n)) for n in (2, 3)]
    >>> caches, logits = kvjax.sweep(model, params, prompts, plans)
    >>> [int(cache.lengths.max()) for cache in caches]
    [2, 3]
  """
  swept = _sweep(model, params, prompts, plans, _required(plans))
  return swept.caches, swept.logits


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


def measured_sweep(
  model: Model, params: PyTree, prompts: Prompts, plans: Sequence[Plan]
) -> Measured:
  """Sweeps, and measures in the same pass what a calibration may depend on.

  Arguments and errors are those of `sweep`.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
    >>> plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
    >>> measured = kvjax.measured_sweep(model, params, prompts, [plan])
    >>> measured.nll.shape
    (2,)
  """
  evaluations = dict.fromkeys(map(Evaluation.of, plans))
  requested = _Requested(likelihood=True, scores=tuple(evaluations))
  return _sweep(model, params, prompts, plans, requested)


class _Requested(NamedTuple):
  """The features to measure in a sweep.

  Attributes:
    likelihood: whether to compute likelihoods; if not, they are NaN.
    scores: evaluations the shape of whose scores is computed, in an order that
      all hosts of a mesh share.
  """

  likelihood: bool
  scores: tuple[Evaluation, ...]


def _required(plans: Sequence[Plan]) -> _Requested:
  """Returns the features that the budgets of plans depend on."""
  calibrated = [p for p in plans if isinstance(p.budget, Calibrated)]
  return _Requested(
    bool(calibrated),
    tuple(
      dict.fromkeys(
        Evaluation.of(plan)
        for plan in calibrated
        if isinstance(plan.budget, Calibrated)
        and not plan.budget.calibration.depends_on.isdisjoint(OF_SCORES)
      )
    ),
  )


def _sweep(
  model: Model,
  params: PyTree,
  prompts: Prompts,
  plans: Sequence[Plan],
  requested: _Requested,
) -> Measured:
  """Sweeps, and measures the requested features."""
  _check_sweep(model, prompts, plans)
  geometry, mask = model.geometry, prompts.protected
  protected = None if mask is None else jnp.asarray(mask)
  prepared = [
    None if plan.adapts else prepare(plan, prompts, geometry) for plan in plans
  ]
  builders: list[CacheBuilder | None] = [
    None
    if ready is None or ready.waits
    else CacheBuilder(model, ready, protected)
    for ready in prepared
  ]
  tokens = jnp.asarray(prompts.tokens)
  lengths = jnp.asarray(prompts.lengths, jnp.int32)
  positions = prompt_programs.positions(lengths, tokens.shape[1])
  hidden, shared = prompt_programs.embed(model, params, tokens, positions)
  weights, optional = layer_stacks(model, params), _optional_activations(plans)
  waiting = [index for index, builder in enumerate(builders) if not builder]
  deferred = Deferred([plans[index] for index in waiting])
  latest: Evaluations = {}
  shapes: dict[Evaluation, list[Float[Array, "3 B"]]] = {
    evaluation: [] for evaluation in requested.scores
  }
  for layer, spec in enumerate(geometry.layers):
    # `hidden` is donated: the states of the layer before are gone after this.
    hidden, activations = prompt_programs.forward_layer(
      weights[spec.weights],
      np.int32(geometry.weight_index[layer]),
      hidden,
      shared,
      positions,
      model=model,
      how=(spec, optional),
    )
    if activations is None:
      continue
    requests = list_evaluations(
      layer, plans, prepared, geometry, requested.scores
    )
    later = {e: scored for e, scored in requests.items() if replay_of(e)}
    now = {e: requests[e] for e in requests if e not in later}
    evaluations = evaluate_all(layer, activations, now, latest)
    # A layer may copy a selection across layers that evict nothing.
    latest = {**latest, **evaluations}
    _add_shapes(shapes, activations, evaluations)
    for plan, builder in zip(plans, builders, strict=True):
      if builder is not None:
        builder.keep(layer, activations, find_evaluated(plan, evaluations))
    _wait_for(hidden)
    # Scores are computed, so optional activations are no longer needed.
    deferred.add(layer, activations, later, evaluations)
  logits, nll = prompt_programs.head(
    params, hidden, tokens, lengths, model=model, measured=requested.likelihood
  )
  for activations, evaluations in deferred.replay(model, params, prompts):
    _add_shapes(shapes, activations, evaluations)
  features: tuple[Features, ...] = ()
  retentions: tuple[Float[np.ndarray, " B"] | None, ...] = (None,) * len(plans)
  if requested.likelihood:
    features = _features(prompts, plans, nll, shapes)
    retentions = tuple(
      plan.budget.retentions(of_plan)
      if isinstance(plan.budget, Calibrated)
      else None
      for plan, of_plan in zip(plans, features, strict=True)
    )
  by_threshold = deferred.prepare_thresholds(plans, prompts, geometry)
  late: list[tuple[Plan, CacheBuilder, HeadCounts]] = []
  for index in waiting:
    plan, shares, ready = plans[index], retentions[index], prepared[index]
    kept = protected
    if isinstance(plan.budget, Threshold):
      kept = jnp.asarray(must_keep(plan.budget, prompts))
      ready, counts = by_threshold[index]
    else:
      if shares is not None:
        ready = prepare_calibrated(plan, shares, prompts, geometry)
      assert ready is not None
      ready, counts = deferred.count_by_head(ready, protected, geometry)
    builder = CacheBuilder(model, ready, kept)
    builders[index] = builder
    late.append((plan, builder, counts))
  deferred.keep(late)
  caches = tuple(builder.cache(lengths) for builder in builders if builder)
  return Measured(caches, logits, nll[0], features, retentions)


def _add_shapes(
  shapes: Mapping[Evaluation, list[Float[Array, "3 B"]]],
  activations: Activations,
  evaluations: Evaluations,
) -> None:
  """Adds the shape of the scores of a layer."""
  for evaluation, found in shapes.items():
    if evaluation in evaluations and evaluations[evaluation][1].has_scores:
      evaluated = evaluations[evaluation][1]
      found.append(shape_of_scores(evaluation, activations.only(()), evaluated))


def _features(
  prompts: Prompts,
  plans: Sequence[Plan],
  nll: Float[Array, "2 B"],
  shapes: Mapping[Evaluation, Sequence[Float[Array, "3 B"]]],
) -> tuple[Features, ...]:
  """Collects the features for each plan, on the host.

  Those of scores are means over the layers that a method scores.
  """
  # One transfer, after the whole pass.
  (of_prompts, of_tails), by_layer = read((nll, list(shapes.values())))
  means = {
    evaluation: np.mean(values, axis=0)
    for evaluation, values in zip(shapes, by_layer, strict=True)
    if values
  }
  lengths = np.asarray(prompts.lengths)
  return tuple(
    Features(of_prompts, lengths, of_tails, *means.get(Evaluation.of(plan), ()))
    for plan in plans
  )


def _wait_for(hidden: Float[Array, "B S E"]) -> None:
  """Blocks the host until a layer's forward pass has been computed.

  The device still compresses the layer then, so that it does not idle. Without
  this, the host would run ahead and allocate activations of many layers.
  """
  if not isinstance(hidden, jax.core.Tracer):
    hidden.block_until_ready()


def _optional_activations(plans: Sequence[Plan]) -> frozenset[str]:
  """Returns the optional activations that any plan depends on."""
  return frozenset[str]().union(*(plan.activations for plan in plans))


def _check_sweep(model: Model, prompts: Prompts, plans: Sequence[Plan]) -> None:
  """Checks the arguments of `sweep`."""
  _check_plans(plans)
  for plan in plans:
    if plan.schedule.block is not None:
      raise InputError(
        f"A sweep shares one pass over whole prompts; give the plan of "
        f"{plan.schedule} to kvjax.prefill."
      )
  check_context(model, np.asarray(prompts.lengths))
  check_tokens(model, prompts.tokens, np.asarray(prompts.lengths))
  for plan in plans:
    check_plan(model, plan)
    check_context_axis(model, plan, prompts.tokens.shape[1])


def _check_plans(plans: Any) -> None:
  """Checks the type of plans, for callers without a static type checker."""
  if isinstance(plans, Plan | str) or not all(
    isinstance(plan, Plan) for plan in plans
  ):
    raise InputError(
      "A sweep takes a list of plans, as kvjax.get_plan makes them of names; "
      f"{plans!r:.80} is no such list."
    )
  if not plans:
    raise InputError("There is nothing to keep; give at least one plan.")
