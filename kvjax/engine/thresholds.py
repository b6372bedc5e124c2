"""Budgets that are thresholds of scores, once all layers are scored."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.allocation.base import LayerBudget
from kvjax.cache.layers import LayerCache
from kvjax.cache.packed import PAGE
from kvjax.engine.compression_plan import Plan
from kvjax.engine.layer_budgets import compressed_layers, kv_heads
from kvjax.engine.prepared import PreparedPlan
from kvjax.engine.shared_budgets import HeadCounts, fit_to_counts
from kvjax.methods.base import ScoringMethod
from kvjax.model import Geometry
from kvjax.options.budgets import Threshold
from kvjax.prompts import Prompts
from kvjax.selection import finite


def must_keep(
  threshold: Threshold, prompts: Prompts
) -> Bool[np.ndarray, "B S"]:
  """Tokens that stay whatever their score: the last and the protected ones."""
  lengths = prompts.known_lengths[:, None]
  last = np.arange(prompts.tokens.shape[1])[None] >= lengths - threshold.window
  return last if prompts.protected is None else last | prompts.protected


def count_reaching(
  plan: Plan,
  prompts: Prompts,
  activations: Mapping[int, Activations],
  scores: Mapping[int, Float[Array, "B K T"]],
) -> HeadCounts:
  """Counts the tokens that reach a plan's threshold, without waiting for it.

  Args:
    plan: a plan whose budget is a `Threshold`.
    prompts: the prompts.
    activations: those of the prompt, for each layer that the plan compresses.
    scores: the method's scores in each of these layers.
  """
  threshold, method = plan.budget, plan.method
  assert isinstance(threshold, Threshold)
  assert isinstance(method, ScoringMethod)
  return dict(
    zip(
      scores,
      _count(
        [activations[layer] for layer in scores],
        list(scores.values()),
        jnp.asarray(must_keep(threshold, prompts)),
        jnp.float32(threshold.least),
        method=method,
      ),
      strict=True,
    )
  )


def prepare_threshold(
  plan: Plan,
  prompts: Prompts,
  geometry: Geometry,
  reached: Mapping[int, Int[np.ndarray, "B K"]],
) -> PreparedPlan:
  """Gives the layers of a plan room for the tokens that reach its threshold.

  Args:
    plan: a plan whose budget is a `Threshold`.
    prompts: the prompts.
    geometry: sizes of the model.
    reached: what `count_reaching` has counted, on the host.

  Returns:
    The plan; it keeps all if nothing is evicted from any layer.
  """
  lengths = prompts.known_lengths
  padded = prompts.tokens.shape[1]
  layers = range(geometry.num_layers)
  # Nothing is packed where nothing is evicted.
  whole = all(np.all(kept >= lengths[:, None]) for kept in reached.values())
  evicting = {} if whole else reached
  counts, totals = [], []
  for layer, spec in enumerate(geometry.layers):
    heads = kv_heads(plan, spec)
    total = lengths * heads
    if layer in reached:
      total = reached[layer].sum(axis=1, dtype=np.int32)
    totals.append(total)
    counts.append(-(-total // heads))
  room = padded
  if evicting:
    # The mean of the heads, which the pages of all layers depend on.
    all_heads = sum(kept.shape[1] for kept in evicting.values())
    by_row = sum(kept.sum(axis=1) for kept in evicting.values())
    room = min(_rounded(-(-int(np.max(by_row)) // all_heads)), padded)
  prepared = PreparedPlan(
    np.array(counts, np.int32),
    np.array(totals, np.int32),
    num_keys=None,
    parts=None,
    shares=(np.array(counts) / lengths).astype(np.float32),
    plan=plan,
    capacities=tuple(room if n in evicting else padded for n in layers),
    keeps_all=tuple(n not in evicting for n in layers),
    compressed=compressed_layers(plan, geometry),
  )
  if not evicting:
    return prepared
  return fit_to_counts(prepared, evicting, padded, geometry)


def _rounded(count: int) -> int:
  """Rounds up to a page, or a sixteenth of its size.

  Few sizes are compiled then. Buckets of prompts are further apart, and would
  waste what a threshold frees.
  """
  power = 1 << max(count - 1, 1).bit_length() - 1
  step = max(PAGE, power // 16)
  return -(-count // step) * step


@functools.partial(jax.jit, static_argnames=("method",))
def _count(
  activations: list[Activations],
  scores: list[Float[Array, "B _ T"]],
  protected: Bool[Array, "B T"],
  least: Float[Array, ""],
  *,
  method: ScoringMethod,
) -> list[Int[Array, "B _"]]:
  """Counts the tokens that each head of each layer keeps."""
  counts: list[Any] = []
  for seen, of_layer in zip(activations, scores, strict=True):
    cache = LayerCache.of(seen.with_kv_heads(of_layer.shape[1]))
    budget = LayerBudget(cache.lengths, cache.capacity, protected=protected)
    stays = budget.must_keep(cache) | method.protected(cache, budget.per_head)
    kept = cache.valid & (stays | (finite(of_layer) >= least))
    counts.append(jnp.sum(kept, axis=-1, dtype=jnp.int32))
  return counts
