"""Whole prompts: one forward pass, compressed layer by layer as it goes.

The host calls one compiled program per layer for the forward pass, one per
method for its scores and one per plan for what is kept. Layers of one kind call
the same programs, and so do other sweeps that have a method or a plan in
common.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.cache import Cache
from kvjax.calibration.record import Calibrated
from kvjax.engine.blocks import prefill_blocks
from kvjax.engine.building import CacheBuilder
from kvjax.engine.compress import Evaluated, Evaluation, evaluate_layer
from kvjax.engine.forward import (
  attend_to_prompt,
  block_positions,
  described,
  index_layer,
  layer_stacks,
)
from kvjax.engine.likelihood import prompt_nll
from kvjax.engine.plans import Plan
from kvjax.engine.prepared import (
  PreparedPlan,
  compressed_layers,
  farthest,
  prepare,
  prepare_calibrated,
)
from kvjax.engine.rerotation import check_rotary
from kvjax.errors import InputError
from kvjax.model import Geometry, LayerSpec, Model, check_context
from kvjax.prompts import Prompts

# What methods have found in a layer, each asked once, with the number of the
# layer where it was.
_Found = Mapping[Evaluation, tuple[int, Evaluated]]


def prefill(
  model: Model, params: PyTree, prompts: Prompts, plan: Plan
) -> tuple[Cache, Float[Array, "B V"]]:
  """Runs prompts and keeps of each layer what the method chooses.

  With whole prompts a layer's full keys and values live only until the layer
  is done; in blocks they never exist. With a `Calibrated` budget those of all
  layers, and the method's scores, live until the prompt has been read: what is
  kept is known then.

  Args:
    model: the functions.
    params: the weights.
    prompts: rows of unequal lengths; each is treated as if it were alone.
    plan: what to keep, how much, and when to evict.

  Returns:
    The compressed cache, and the logits after each row's last token. Whole
    prompts are compressed after these; blocks have attended to what was left.

  Raises:
    InputError: a prompt is longer than the model's context or protects more
      tokens than are kept, or the method turns keys and the model cannot.
  """
  if plan.schedule.block is None:
    (cache,), logits = sweep(model, params, prompts, [plan])
    return cache, logits
  block = max(plan.schedule.block, plan.schedule.first or 0)
  check_context(model, farthest(plan, np.asarray(prompts.lengths), block))
  _check_rotary(model, plan)
  return prefill_blocks(model, params, prompts, plan)


def sweep(
  model: Model, params: PyTree, prompts: Prompts, plans: Sequence[Plan]
) -> tuple[tuple[Cache, ...], Float[Array, "B V"]]:
  """Runs prompts once and keeps a cache for each of many plans.

  A method's scores are computed once, whatever the number of its budgets.

  Args:
    model: the functions.
    params: the weights.
    prompts: rows of unequal lengths.
    plans: methods and budgets, for whole prompts.

  Returns:
    One cache for each plan, and the logits after each row's last token.

  Raises:
    InputError: a prompt is longer than the model's context, there is no plan,
      or one works in blocks, which takes a forward pass of its own.
  """
  swept = _sweep(model, params, prompts, plans, _measures(plans))
  return swept.caches, swept.logits


class Measured(NamedTuple):
  """What a sweep has found, and what the prompts are like.

  Attributes:
    caches: one for each plan.
    logits: after each row's last token.
    nll: NLL(c) of each row; see `kvjax.negative_log_likelihood`.
    retentions: r* of each row for plans with a `Calibrated` budget, None for
      others.
  """

  caches: tuple[Cache, ...]
  logits: Float[Array, "B V"]
  nll: Float[Array, " B"]
  retentions: tuple[Float[np.ndarray, " B"] | None, ...]


def measured_sweep(
  model: Model, params: PyTree, prompts: Prompts, plans: Sequence[Plan]
) -> Measured:
  """Sweeps, and measures by the same pass how likely the prompts are.

  Arguments and errors are those of `sweep`.
  """
  return _sweep(model, params, prompts, plans, measured=True)


def _measures(plans: Sequence[Plan]) -> bool:
  return any(isinstance(plan.budget, Calibrated) for plan in plans)


def _sweep(
  model: Model,
  params: PyTree,
  prompts: Prompts,
  plans: Sequence[Plan],
  measured: bool,
) -> Measured:
  """See `measured_sweep`; likelihoods that are not asked for are NaN."""
  _check_sweep(model, prompts, plans)
  geometry, mask = model.geometry, prompts.protected
  protected = None if mask is None else jnp.asarray(mask)
  prepared = [
    None
    if isinstance(plan.budget, Calibrated)
    else prepare(plan, prompts, geometry)
    for plan in plans
  ]
  builders = [
    None if ready is None else CacheBuilder(model, ready, protected)
    for ready in prepared
  ]
  tokens = jnp.asarray(prompts.tokens)
  lengths = jnp.asarray(prompts.lengths, jnp.int32)
  positions = _positions(lengths, tokens.shape[1])
  hidden, shared = _embed(model, params, tokens, positions)
  weights, reads = layer_stacks(model, params), _reads(plans)
  deferred: list[tuple[int, Activations, _Found]] = []
  found: _Found = {}
  for layer, spec in enumerate(geometry.layers):
    hidden, activations = _forward_layer(
      weights[spec.weights],
      np.int32(geometry.weight_index[layer]),
      hidden,
      shared,
      positions,
      model=model,
      how=(spec, reads),
    )
    if activations is None:
      continue
    demands = _demands(layer, plans, prepared, geometry)
    found = _evaluate(layer, activations, demands, found)
    for plan, builder in zip(plans, builders, strict=True):
      if builder is not None:
        builder.keep(layer, activations, _of(plan, found))
    _wait_for(hidden)
    if None in prepared:
      # Scores have been computed: what they alone read is let go.
      deferred.append((layer, activations.only(()), found))
  logits, nll = _head(
    params, hidden, tokens, lengths, model=model, measured=measured
  )
  retentions = tuple(
    plan.budget.retentions(np.asarray(nll), np.asarray(prompts.lengths))
    if isinstance(plan.budget, Calibrated)
    else None
    for plan in plans
  )
  for index, (plan, shares) in enumerate(zip(plans, retentions, strict=True)):
    if shares is not None:
      late = prepare_calibrated(plan, shares, prompts, geometry)
      builders[index] = CacheBuilder(model, late, protected)
  waiting = [i for i, shares in enumerate(retentions) if shares is not None]
  while deferred:
    # No layer outlives its turn.
    layer, activations, found = deferred.pop(0)
    for index in waiting:
      builder = builders[index]
      assert builder is not None
      builder.keep(layer, activations, _of(plans[index], found))
  caches = tuple(builder.cache(lengths) for builder in builders if builder)
  return Measured(caches, logits, nll, retentions)


def _wait_for(hidden: Float[Array, "B S E"]) -> None:
  """Lets the host go on when a layer's forward pass has been computed.

  What is kept of the layer is still being computed then, so that the device
  does not idle; but no activations of a third layer are allocated.
  """
  if not isinstance(hidden, jax.core.Tracer):
    hidden.block_until_ready()


def _reads(plans: Sequence[Plan]) -> frozenset[str]:
  """Optional activations that any plan depends on."""
  return frozenset[str]().union(*(plan.reads for plan in plans))


def _demands(
  layer: int,
  plans: Sequence[Plan],
  prepared: Sequence[PreparedPlan | None],
  geometry: Geometry,
) -> Mapping[Evaluation, bool]:
  """What is asked about a layer, and whether anybody chooses by it."""
  demands: dict[Evaluation, bool] = {}
  for plan, ready in zip(plans, prepared, strict=True):
    evaluation = Evaluation.of(plan)
    chosen = compressed_layers(plan, geometry)[layer]
    scored = chosen and (ready is None or not ready.whole[layer])
    if scored or evaluation.recursive:
      demands[evaluation] = demands.get(evaluation, False) or scored
  return demands


def _evaluate(
  layer: int,
  activations: Activations,
  demands: Mapping[Evaluation, bool],
  before: _Found,
) -> _Found:
  """What methods find in a layer, or have found in the one that it copies."""
  found = {}
  for evaluation, scored in demands.items():
    traits = evaluation.method.traits
    source = traits.source_layer(layer)
    if evaluation in before and before[evaluation][0] == source:
      found[evaluation] = before[evaluation]
      continue
    found[evaluation] = (
      source,
      evaluate_layer(
        evaluation,
        np.int32(layer),
        activations.only(traits.reads),
        scored=scored,
      ),
    )
  return found


def _of(plan: Plan, found: _Found) -> Evaluated | None:
  """What a plan's method has found, if it was asked."""
  return found.get(Evaluation.of(plan), (0, None))[1]


@functools.partial(jax.jit, static_argnames=("length",))
def _positions(lengths: Int[Array, " B"], length: int) -> Int[Array, "B S"]:
  return block_positions(jnp.zeros_like(lengths), length, lengths)


@functools.partial(jax.jit, static_argnames=("model",))
def _embed(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  positions: Int[Array, "B S"],
) -> tuple[Float[Array, "B S E"], PyTree]:
  return model.embed(params, tokens, positions)


@functools.partial(
  jax.jit, static_argnames=("model", "how"), donate_argnames=("hidden",)
)
def _forward_layer(
  stack: PyTree,
  index: Int[Array, ""],
  hidden: Float[Array, "B S E"],
  shared: PyTree,
  positions: Int[Array, "B S"],
  *,
  model: Model,
  how: tuple[LayerSpec, Collection[str]],
) -> tuple[Float[Array, "B S E"], Activations | None]:
  """Runs a layer over whole prompts.

  Args:
    stack: weights of the layers of its shapes.
    index: of the layer among them.
    hidden: what the layer before returned; it is consumed.
    shared: what all layers share.
    positions: of the tokens.
    model: the functions.
    how: the layer's spec, and the optional activations to return.

  Returns:
    The hidden states, and the activations; None if the layer has no cache.
  """
  spec, reads = how

  def attend(
    activations: Activations,
  ) -> tuple[Float[Array, "B N S Dv"], Activations]:
    activations = described(spec, activations)
    return attend_to_prompt(activations), activations.only(reads)

  hidden, activations = model.block(
    index_layer(stack, jnp.asarray(index)),
    spec,
    hidden,
    shared,
    positions,
    attend,
  )
  return hidden, activations if spec.cache else None


@functools.partial(jax.jit, static_argnames=("model", "measured"))
def _head(
  params: PyTree,
  hidden: Float[Array, "B S E"],
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  *,
  model: Model,
  measured: bool,
) -> tuple[Float[Array, "B V"], Float[Array, " B"]]:
  """Logits after each row's last token, and NLL(c) if it is asked for."""
  last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
  logits = model.logits(params, model.normalize(params, last)[:, 0])
  if not measured:
    return logits, jnp.full(lengths.shape, jnp.nan)
  hidden = model.normalize(params, hidden)
  return logits, prompt_nll(model, params, hidden, tokens, lengths)


def _check_sweep(model: Model, prompts: Prompts, plans: Sequence[Plan]) -> None:
  """Refuses what `sweep` refuses."""
  if not plans:
    raise InputError("There is nothing to keep; give at least one plan.")
  for plan in plans:
    if plan.schedule.block is not None:
      raise InputError(
        f"A sweep shares one pass over whole prompts; give the plan of "
        f"{plan.schedule} to kvjax.prefill."
      )
  check_context(model, np.asarray(prompts.lengths))
  for plan in plans:
    _check_rotary(model, plan)


def _check_rotary(model: Model, plan: Plan) -> None:
  if plan.method.traits.renumbers:
    check_rotary(model)
