"""Prefills a batch of prompts for many plans, in as few passes as possible."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

import kvjax
from kvjax.engine.plan_fit import repeats
from kvjax.models.pretrained import Pretrained


class Prefilled(NamedTuple):
  """The result of prefilling a batch for one plan.

  Attributes:
    cache: the compressed cache.
    logits: logits after the prompts.
    retentions: retention of each row, if a calibration chose it.
  """

  cache: kvjax.Cache
  logits: Float[Array, "B V"]
  retentions: Float[np.ndarray, " B"] | None = None


def prefill_all(
  lm: Pretrained, plans: Sequence[kvjax.Plan], contexts: kvjax.Prompts
) -> list[Prefilled]:
  """Prefills for every plan; plans for whole prompts share a pass."""
  model, params = lm.model, lm.params
  contexts = with_request(lm, plans, contexts)
  shared = [plan for plan in plans if plan.schedule.block is None]
  shared_results = iter(_prefill_shared(lm, shared, contexts) if shared else ())
  return [
    next(shared_results)
    if plan.schedule.block is None
    else Prefilled(*kvjax.prefill(model, params, contexts, plan))
    for plan in plans
  ]


def with_request(
  lm: Pretrained, plans: Sequence[kvjax.Plan], contexts: kvjax.Prompts
) -> kvjax.Prompts:
  """Adds the request to repeat the contexts, if a plan needs it."""
  return asked_to_repeat(lm, contexts) if any(map(repeats, plans)) else contexts


def asked_to_repeat(lm: Pretrained, contexts: kvjax.Prompts) -> kvjax.Prompts:
  """Adds the request to repeat the contexts."""
  request = kvjax.RepeatRequest.of(lm.text)
  return dataclasses.replace(contexts, repeat_request=request)


def _prefill_shared(
  lm: Pretrained, plans: Sequence[kvjax.Plan], contexts: kvjax.Prompts
) -> list[Prefilled]:
  """Prefills in one pass, with likelihoods only if a plan needs them."""
  model, params = lm.model, lm.params
  if any(isinstance(plan.budget, kvjax.Calibrated) for plan in plans):
    measured = kvjax.measured_sweep(model, params, contexts, plans)
    pairs = zip(measured.caches, measured.retentions, strict=True)
    return [
      Prefilled(cache, measured.logits, retentions)
      for cache, retentions in pairs
    ]
  caches, logits = kvjax.sweep(model, params, contexts, plans)
  return [Prefilled(cache, logits) for cache in caches]
