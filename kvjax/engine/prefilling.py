"""The prompt's forward pass, compressed layer by layer as it goes."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from kvjax.cache.cache import Cache
from kvjax.calibration.record import Calibrated
from kvjax.engine.blocks import prefill_blocks
from kvjax.engine.one_pass import one_pass
from kvjax.engine.plans import Plan
from kvjax.engine.rerotation import check_rotary
from kvjax.engine.uncut import Cut, cut_layers
from kvjax.errors import InputError
from kvjax.model import Model, check_context
from kvjax.prompts import Prompts


def prefill(
  model: Model,
  params: PyTree,
  prompts: Prompts,
  plan: Plan,
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
  layers = model.geometry.layers
  block = max(plan.schedule.block, plan.schedule.first or 0)
  lengths = np.asarray(prompts.lengths)
  check_context(model, plan.reach(lengths, layers, block))
  _check(model, prompts, plan)
  return prefill_blocks(model, params, prompts, plan)


def sweep(
  model: Model, params: PyTree, prompts: Prompts, plans: Sequence[Plan]
) -> tuple[tuple[Cache, ...], Float[Array, "B V"]]:
  """As `prefill`, for many methods and budgets from one forward pass.

  A method's scores are computed once, whatever the number of its budgets.

  Returns:
    One cache for each plan, and the logits after each row's last token.

  Raises:
    InputError: a prompt is longer than the model's context, there is no plan,
      or one works in blocks, which takes a forward pass of its own.
  """
  calibrated = any(isinstance(plan.budget, Calibrated) for plan in plans)
  swept = _swept(model, params, prompts, plans, measured=calibrated)
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
  """As `sweep`, and tells how likely the prompts are by the same pass."""
  return _swept(model, params, prompts, plans, measured=True)


def _swept(
  model: Model,
  params: PyTree,
  prompts: Prompts,
  plans: Sequence[Plan],
  measured: bool,
) -> Measured:
  """As `measured_sweep`; likelihoods that are not asked for are NaN."""
  _check_sweep(model, prompts, plans)
  lengths = np.asarray(prompts.lengths)
  padded = prompts.tokens.shape[1]
  geometry = model.geometry
  mask = prompts.protected
  protected = None if mask is None else jnp.asarray(mask)
  fixed = [p for p in plans if not isinstance(p.budget, Calibrated)]
  waiting = [p.judging for p in plans if isinstance(p.budget, Calibrated)]
  lookups = [plan.lookup for plan in fixed]
  found = one_pass(
    model,
    params,
    jnp.asarray(prompts.tokens),
    jnp.asarray(lengths),
    [jax.tree.map(jnp.asarray, p.kept(lengths, geometry)) for p in fixed],
    [x and jnp.asarray(x.counts(lengths)) for x in lookups],
    protected,
    plans=tuple(fixed),
    rooms=tuple(p.room(padded, lengths, geometry.layers) for p in fixed),
    most_reads=tuple(x.most(padded, lengths) if x else 0 for x in lookups),
    waiting=tuple(dict.fromkeys(waiting)),
    measured=measured,
  )
  retentions = tuple(
    plan.budget.retentions(np.asarray(found.nll), lengths)
    if isinstance(plan.budget, Calibrated)
    else None
    for plan in plans
  )
  cuts = [
    Cut.of(plan, shares, prompts, geometry)
    for plan, shares in zip(plans, retentions, strict=True)
    if shares is not None
  ]
  uncut = found.uncut
  late = iter(cut_layers(model, uncut, cuts, protected) if uncut else ())
  early = iter(found.caches)
  caches = tuple(
    next(early if shares is None else late) for shares in retentions
  )
  return Measured(caches, found.logits, found.nll, retentions)


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
    _check(model, prompts, plan)


def _check(model: Model, prompts: Prompts, plan: Plan) -> None:
  """Refuses a plan that does not suit the prompts or the model."""
  # What a calibrated budget leaves is checked when it is known.
  if not isinstance(plan.budget, Calibrated):
    plan.check_protected(prompts, model.geometry.layers)
  if plan.method.rerotates:
    check_rotary(model)
