"""A batch of prompts under many plans, in as few passes as it takes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

import kvjax
from kvjax.models.pretrained import Pretrained


class Prefilled(NamedTuple):
  """What is left of a batch's prompts.

  Attributes:
    cache: of a plan.
    logits: after the prompts.
    retentions: of the rows, where a calibration has told them.
  """

  cache: kvjax.Cache
  logits: Float[Array, "B V"]
  retentions: Float[np.ndarray, " B"] | None = None


def prefilled(
  lm: Pretrained, plans: Sequence[kvjax.Plan], contexts: kvjax.Prompts
) -> list[Prefilled]:
  """A cache and logits per plan; plans for whole prompts share a pass."""
  model, params = lm.model, lm.params
  shared = [plan for plan in plans if plan.schedule.block is None]
  swept = iter(_swept(lm, shared, contexts) if shared else ())
  return [
    next(swept)
    if plan.schedule.block is None
    else Prefilled(*kvjax.prefill(model, params, contexts, plan))
    for plan in plans
  ]


def _swept(
  lm: Pretrained, plans: Sequence[kvjax.Plan], contexts: kvjax.Prompts
) -> list[Prefilled]:
  """From one pass, which tells likelihoods only if a plan asks for them."""
  model, params = lm.model, lm.params
  if any(isinstance(plan.budget, kvjax.Calibrated) for plan in plans):
    found = kvjax.measured_sweep(model, params, contexts, plans)
    pairs = zip(found.caches, found.retentions, strict=True)
    return [Prefilled(cache, found.logits, told) for cache, told in pairs]
  caches, logits = kvjax.sweep(model, params, contexts, plans)
  return [Prefilled(cache, logits) for cache in caches]
