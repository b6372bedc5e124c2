"""Prefill of prompts: by one plan, whole or in blocks, or by many at once."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, PyTree

from kvjax.cache.cache import Cache
from kvjax.cache.sharding import check_mesh
from kvjax.calibration.features import OF_SCORES
from kvjax.calibration.record import Calibrated
from kvjax.engine.blocks import prefill_blocks
from kvjax.engine.compress import Evaluation
from kvjax.engine.compression_plan import Plan
from kvjax.engine.layer_budgets import check_always_kept
from kvjax.engine.plan_fit import (
  check_context_axis,
  check_plan,
  check_repeat_request,
  recites,
  warn_without_request,
)
from kvjax.engine.preparing import max_span
from kvjax.engine.recitation import check_recitable, recite_grids
from kvjax.engine.sweeping import Measured, Requested, sweep_prompts
from kvjax.errors import InputError
from kvjax.model import Model, check_context, check_model, check_tokens
from kvjax.prompts import Prompts, check_batch


def prefill(
  model: Model, params: PyTree, prompts: Prompts, plan: Plan
) -> tuple[Cache, Float[Array, "B V"]]:
  """Runs prompts and keeps the tokens of each layer that the method selects.

  With whole prompts, a layer's full keys and values exist only until the layer
  is done; in blocks they never exist. With a `Calibrated` budget, a `Threshold`
  or a method that joins the scores of all layers, those of all layers and the
  method's scores exist until the end of the forward pass, when the budget or
  the selection is known. With a calibration of preset "recite", the caches of
  its grid exist before that, until they have been recited.

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
    InputError: an argument has a wrong type, a prompt is longer than the
      model's context, has a token that it does not embed or protects more
      tokens than are kept, the plan does not fit the model's layers, a prompt
      cannot be recited where the budget depends on that (see `kvjax.recited`),
      the method rerotates keys and the model cannot, the mesh has other axes
      than those of `kvjax.cache.sharding.parse_mesh`, prompts are an argument
      of `jax.jit`, or it is called within `jax.jit` and the sizes of the cache
      depend on scores.

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
  check_model(model)
  if not isinstance(plan, Plan):
    raise InputError(
      "A prefill takes a plan, as kvjax.get_plan makes it of a name; "
      f"{plan!r:.80} is not one."
    )
  check_batch(prompts)
  if plan.schedule.block is None:
    (cache,), logits = sweep(model, params, prompts, [plan])
    return cache, logits
  check_mesh(jax.sharding.get_abstract_mesh())
  # Either may be the larger one.
  block = max(plan.schedule.block, plan.schedule.first or 0)
  check_context(model, max_span(plan, prompts.known_lengths, block))
  check_tokens(model, prompts.tokens, prompts.known_lengths)
  check_plan(model, plan)
  check_context_axis(model, params, plan, prompts.tokens.shape[1])
  check_always_kept(plan, prompts, model.geometry)
  return prefill_blocks(model, params, prompts, plan)


def sweep(
  model: Model, params: PyTree, prompts: Prompts, plans: Iterable[Plan]
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
    InputError: there is no plan, one works in blocks, which needs its own
      forward pass, or see `prefill`.

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
  plans = _check_sweep(model, params, prompts, plans)
  swept = _sweep(model, params, prompts, plans, _required(plans))
  return swept.caches, swept.logits


def measured_sweep(
  model: Model, params: PyTree, prompts: Prompts, plans: Iterable[Plan]
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
  plans = _check_sweep(model, params, prompts, plans)
  evaluations = dict.fromkeys(map(Evaluation.of, plans))
  requested = Requested(likelihood=True, scores=tuple(evaluations))
  return _sweep(model, params, prompts, plans, requested)


def _sweep(
  model: Model,
  params: PyTree,
  prompts: Prompts,
  plans: tuple[Plan, ...],
  requested: Requested,
) -> Measured:
  """Sweeps; before that, plans whose budgets depend on it recite."""
  recitals = recite_grids(model, params, prompts, plans)
  return sweep_prompts(model, params, prompts, plans, requested, recitals)


def _required(plans: Sequence[Plan]) -> Requested:
  """Returns the features that the budgets of plans depend on."""
  calibrated = [p for p in plans if isinstance(p.budget, Calibrated)]
  return Requested(
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


def _check_sweep(
  model: Model, params: PyTree, prompts: Prompts, plans: Iterable[Plan]
) -> tuple[Plan, ...]:
  """Checks the arguments of `sweep`; returns the plans."""
  check_model(model)
  plans = _check_plans(plans)
  check_batch(prompts)
  check_mesh(jax.sharding.get_abstract_mesh())
  for plan in plans:
    if plan.schedule.block is not None:
      raise InputError(
        f"A sweep shares one pass over whole prompts; give the plan of "
        f"{plan.schedule} to kvjax.prefill."
      )
  check_context(model, prompts.known_lengths)
  check_tokens(model, prompts.tokens, prompts.known_lengths)
  for plan in plans:
    check_plan(model, plan)
    check_context_axis(model, params, plan, prompts.tokens.shape[1])
  check_repeat_request(model, plans, prompts)
  warn_without_request(plans, prompts)
  if any(map(recites, plans)):
    check_recitable(model, prompts)
  return plans


def _check_plans(plans: Any) -> tuple[Plan, ...]:
  """Checks the type of plans, for callers without a static type checker."""
  # An iterator would be used up by the first of many loops.
  listed = tuple(plans) if isinstance(plans, Iterable) else (None,)
  if not all(isinstance(plan, Plan) for plan in listed):
    raise InputError(
      "A sweep takes a list of plans, as kvjax.get_plan makes them of names; "
      f"{plans!r:.80} is no such list."
    )
  if not listed:
    raise InputError("There is nothing to keep; give at least one plan.")
  return listed
