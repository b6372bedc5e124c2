"""How much of its prompt a compressed cache can still recite."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, PyTree

from kvjax.cache.cache import Cache
from kvjax.calibration.record import Calibrated
from kvjax.engine.capacity import check_caches
from kvjax.engine.compression_plan import Plan
from kvjax.engine.layer_budgets import check_always_kept
from kvjax.engine.likelihood import token_nll
from kvjax.engine.plan_fit import recites
from kvjax.engine.replay import common_prefix
from kvjax.engine.sweeping import Requested, sweep_prompts
from kvjax.errors import InputError, warn
from kvjax.hosts import read
from kvjax.methods import FullKV
from kvjax.model import (
  Geometry,
  Model,
  check_context,
  check_model,
  check_tokens,
)
from kvjax.options.budgets import Retention
from kvjax.prompts import Prompts, check_batch


def recited(
  model: Model,
  params: PyTree,
  prompts: Prompts,
  full: Cache,
  caches: Sequence[Cache],
  weights: Mapping[int, float] | None = None,
) -> Float[np.ndarray, "P B"]:
  """Computes what share of its prompt each cache recites as the full one does.

  The model is asked to repeat the prompt (`Prompts.repeat_request`), and then
  reads it again, token by token in one pass. With d = max(0, nll - nll of the
  full cache) of a token, its share is exp(-d), the ratio of its likelihoods, at
  most 1. The result is the mean share over the tokens after the chat template,
  1 for a cache that has lost nothing. The caches are left unchanged.

  Source: the request is that of Kim et al., arXiv 2505.23416 (KVzip), Section
  3.2, here for the whole prompt at once; the measure is ours.

  Args:
    model: the functions.
    params: the weights.
    prompts: the prompts, with their request.
    full: their full cache.
    caches: other caches of them, by any plans that do not evict while decoding.
    weights: weight of each token id in the mean, 0 for ids that are not there.
      Without them, and in rows where all would be 0, all tokens weigh the same.

  Returns:
    The means of each cache and row, in float64.

  Raises:
    InputError: weights are no mapping of numbers, prompts have no request, a
      cache has another number of rows or evicts while decoding, or prompt,
      request and prompt together are longer than the model's context.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> request = kvjax.RepeatRequest(first=(11, 12), suffix=(2,))
    >>> prompts = kvjax.Prompts.of([[5, 6, 7, 8]], repeat_request=request)
    >>> plans = [kvjax.get_plan("full", 1.0), kvjax.get_plan("keydiff", 0.5)]
    >>> (full, half), _ = kvjax.sweep(model, params, prompts, plans)
    >>> shares = kvjax.recited(model, params, prompts, full, [full, half])
    >>> bool(shares[0, 0] == 1 > shares[1, 0])
    True
  """
  listed = list(caches) if isinstance(caches, Sequence) else [caches]
  _check_weights(weights)
  check_caches([full, *listed])
  check_recitable(model, prompts)
  _check_rows(prompts, [full, *listed])
  questions, tokens = _request(prompts), _recitation(prompts)
  counted = _weights(tokens, weights or {})

  def losses(cache: Cache) -> Float[np.ndarray, "B S"]:
    found = token_nll(model, params, cache, questions, tokens)
    return np.asarray(read(found), np.float64)

  best = losses(full)
  shares = [_mean_share(losses(cache) - best, counted) for cache in listed]
  return np.array(shares).reshape(len(listed), len(prompts.tokens))


def recite_grids(
  model: Model, params: PyTree, prompts: Prompts, plans: Sequence[Plan]
) -> tuple[Float[np.ndarray, "B R"] | None, ...]:
  """Recites prompts at each retention of the grids of calibrated plans.

  Args:
    model: the functions.
    params: the weights.
    prompts: the prompts, which `check_recitable` has checked.
    plans: the plans; each that recites has a pass over the prompts of its own.

  Returns:
    The quality at each retention of its grid for plans that recite, None for
    others.
  """
  return tuple(
    _recite_grid(model, params, prompts, plan) if recites(plan) else None
    for plan in plans
  )


def _recite_grid(
  model: Model, params: PyTree, prompts: Prompts, plan: Plan
) -> Float[np.ndarray, "B R"] | None:
  """Recites prompts at each retention of the grid of a plan.

  It is None if everything is kept whatever they recite, NaN for rows without a
  token that counts, and -inf where a retention cannot hold protected tokens.
  """
  budget = plan.budget
  assert isinstance(budget, Calibrated)
  record = budget.calibration
  if record.curve_target(budget.tau) == 1:
    return None
  full = Plan(FullKV(), Retention(1.0), per_query_head=plan.per_query_head)
  # What evicts while decoding follows later, and does not recite.
  bare = dataclasses.replace(plan, budget=Retention(1.0), decoding=None)
  shares = [Retention(share, budget.rounding) for share in record.grid]
  grid = [dataclasses.replace(bare, budget=share) for share in shares]
  nothing = Requested(likelihood=False, scores=())
  weights = dict(record.token_weights)
  found = np.full((len(prompts.tokens), len(grid)), -np.inf)
  held = [_held(each, prompts, model.geometry) for each in grid]
  # One pass, unless a retention holds the protected tokens of some rows only.
  for rows in filter(any, dict.fromkeys(held)):
    alike = [number for number, each in enumerate(held) if each == rows]
    own = _protecting(prompts, rows)
    plans = [full, *(grid[number] for number in alike)]
    first, *others = sweep_prompts(model, params, own, plans, nothing).caches
    recites_now = recited(model, params, own, first, others, weights).T
    found[np.ix_(np.array(rows), alike)] = recites_now[np.array(rows)]
  return np.where(_counted(prompts, weights)[:, None], found, np.nan)


def _held(plan: Plan, prompts: Prompts, geometry: Geometry) -> tuple[bool, ...]:
  """For each row, whether the plan keeps as many tokens as are protected."""

  def holds(row: int) -> bool:
    try:
      check_always_kept(plan, prompts.row(row), geometry)
    except InputError:
      return False
    return True

  return tuple(map(holds, range(len(prompts.tokens))))


def _protecting(prompts: Prompts, rows: Sequence[bool]) -> Prompts:
  """The prompts, with nothing protected in all but these rows."""
  if prompts.protected is None:
    return prompts
  protected = read(prompts.protected) & np.array(rows)[:, None]
  return dataclasses.replace(prompts, protected=protected)


def _counted(
  prompts: Prompts, weights: Mapping[int, float]
) -> Bool[np.ndarray, " B"]:
  """Whether rows have a token that counts; warns of those that do not."""
  rows = _recitation(prompts).rows()
  counted = np.array([not weights.keys().isdisjoint(row) for row in rows])
  counted |= not weights
  if not np.all(counted):
    warn(
      f"{np.sum(~counted)} of {len(rows)} prompts keep everything, as they "
      "have no token that the answers of the calibration had; calibrate on "
      "contexts like them."
    )
  return counted


def check_recitable(model: Model, prompts: Prompts) -> None:
  """Refuses prompts that a model cannot be asked to recite.

  Raises:
    InputError: they do not say how to ask, the request has tokens that the
      model does not embed, or prompt, request and prompt together are longer
      than the model's context.
  """
  check_model(model)
  check_batch(prompts)
  request = prompts.repeat_request
  asked = len(request.first) + len(request.suffix)
  if not asked:
    raise InputError(
      "To recite prompts, the model must be asked to repeat them, and these "
      "prompts do not say how; lm.prompts(text) does, or give kvjax.Prompts "
      "repeat_request=kvjax.RepeatRequest.of(lm.text)."
    )
  ids = np.array([[*request.first, *request.suffix]], np.int32)
  check_tokens(model, ids, np.array([asked]))
  lengths = prompts.known_lengths
  total = lengths + asked + _recitation(prompts).known_lengths
  check_context(model, total, "The prompt, with all of it recited,")


def _check_weights(weights: Any) -> None:
  """Refuses what is not given by token, for callers without a type checker."""
  if weights is None:
    return
  given = weights.values() if isinstance(weights, Mapping) else [math.nan]
  if not all(0 <= x < math.inf for x in given):
    raise InputError(
      "The weights of tokens are finite numbers from 0 on by token id, as in "
      f"dict(record.token_weights); {weights!r:.80} is another."
    )


def _check_rows(prompts: Prompts, caches: Sequence[Cache]) -> None:
  rows = len(prompts.tokens)
  for cache in caches:
    if len(cache.next_positions) != rows:
      raise InputError(
        f"There are {rows} prompts, and a cache has "
        f"{len(cache.next_positions)} rows; give the caches of these prompts."
      )
  full, *_ = caches
  if np.any(read(full.next_positions) != prompts.known_lengths):
    raise InputError(
      "The full cache is that of other prompts, as its rows have other "
      "lengths; give that of these prompts."
    )


def _request(prompts: Prompts) -> Prompts:
  """The tokens that ask for a recitation, for each row."""
  request = prompts.repeat_request
  ids = [*request.first, *request.suffix]
  return Prompts.of([ids] * len(prompts.tokens), len(ids))


def _recitation(prompts: Prompts) -> Prompts:
  """The tokens that are recited: all after the chat template.

  Of a row that is nothing else, it is the last token.
  """
  lengths = prompts.known_lengths
  template = common_prefix(
    jnp.asarray(prompts.tokens),
    jnp.asarray(lengths),
    ids=prompts.repeat_request.prefix,
  )
  starts = np.minimum(read(template), lengths - 1)
  rows = [
    row[start:] for row, start in zip(prompts.rows(), starts, strict=True)
  ]
  # Prompts of one width share a program.
  return Prompts.of(rows, prompts.tokens.shape[1])


def _weights(
  tokens: Prompts, weights: Mapping[int, float]
) -> Float[np.ndarray, "B S"]:
  """The weight of each token, 0 for padding."""
  ids, places = np.unique(tokens.tokens, return_inverse=True)
  by_id = np.array([weights.get(int(number), 0.0) for number in ids])
  slots = np.arange(tokens.tokens.shape[1])[None]
  real = slots < tokens.known_lengths[:, None]
  given = np.where(real, by_id[places.reshape(real.shape)], 0.0)
  any_given = np.any(given > 0, axis=1, keepdims=True)
  return np.where(any_given, given, real.astype(np.float64))


def _mean_share(
  lost: Float[np.ndarray, "B S"], weights: Float[np.ndarray, "B S"]
) -> Float[np.ndarray, " B"]:
  """Mean of exp(-lost) at most 1, by weights; NaN stays NaN."""
  shares = np.exp(-np.maximum(lost, 0.0))
  total = np.sum(np.where(weights > 0, weights * shares, 0.0), axis=1)
  return total / np.sum(weights, axis=1)
