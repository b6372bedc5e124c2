"""Spreads the budget of a plan over the layers and rows of prompts."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from kvjax.allocation.base import Sizes
from kvjax.cache.sharding import replicate
from kvjax.calibration.record import Calibrated
from kvjax.engine.compression_plan import Plan
from kvjax.engine.layer_budgets import (
  budget_sizes,
  by_layer,
  check_always_kept,
  check_counts,
  compressed_layers,
  kv_heads,
  layer_budgets,
)
from kvjax.engine.prepared import PreparedPlan
from kvjax.model import Geometry
from kvjax.options.budgets import Retention, Tokens
from kvjax.prompts import Prompts, bucket

# Maximum number of different capacities of the layers of a model.
_MOST_SIZES = 8


def prepare(plan: Plan, prompts: Prompts, geometry: Geometry) -> PreparedPlan:
  """Spreads a plan's budget over prompts that are compressed as a whole.

  Raises:
    InputError: a prompt protects more tokens than are kept, or a budget per
      layer has another number of layers than the model.
  """
  lengths = prompts.known_lengths
  padded = prompts.tokens.shape[1]
  check_always_kept(plan, prompts, geometry)
  spread, sizes = plan.spread, budget_sizes(plan, geometry)
  budgets = layer_budgets(plan, geometry)
  counts = by_layer(budgets, lambda b: spread.counts(b, lengths, sizes))
  check_counts(
    spread, counts, sizes.layers, len(lengths), even=len(budgets) == 1
  )
  totals = by_layer(budgets, lambda b: spread.totals(b, lengths, sizes))
  # By the bucket, not by the lengths: its prompts then share programs.
  slots = by_layer(budgets, lambda b: spread.capacities(b, padded, sizes))
  parts = spread.parts(budgets[0], lengths, padded)
  shares = counts / lengths
  if not spread.spreads_layers:
    retentions = [
      b.share if isinstance(b, Retention) else np.nan for b in budgets
    ]
    exact = np.array(retentions)[:, None]
    shares = np.where(np.isnan(exact), shares, exact)
  # Counts are means, rounded up: heads together may keep less.
  heads = np.array(sizes.heads, np.int64)[:, None]
  keeps_all = (slots >= padded) & np.all(totals >= heads * lengths, axis=1)
  slots = _round_capacities(np.maximum(slots, counts.max(axis=1)))
  slots = np.minimum(slots, padded)
  return _assign_layers(
    plan,
    prompts,
    geometry,
    _Spread(counts, totals, slots, keeps_all, shares, parts),
  )


class _Spread(NamedTuple):
  """A budget, spread over the compressible layers and the rows.

  Attributes:
    counts: tokens that each head keeps.
    totals: tokens that all heads keep together.
    slots: capacity of each layer.
    keeps_all: whether no row of a layer has to evict anything.
    shares: share of its tokens that a row is to keep, before rounding.
    parts: tokens that each head keeps of each part of a row, if counted so.
  """

  counts: Int[np.ndarray, "C B"]
  totals: Int[np.ndarray, "C B"]
  slots: Int[np.ndarray, " C"]
  keeps_all: Bool[np.ndarray, " C"]
  shares: Float[np.ndarray, "C B"]
  parts: Int[np.ndarray, "B P"] | None


def prepare_calibrated(
  plan: Plan,
  retentions: Float[np.ndarray, " B"],
  prompts: Prompts,
  geometry: Geometry,
) -> PreparedPlan:
  """Spreads a calibrated budget, with a different retention for every row.

  Each row keeps what it would keep alone with its retention. Capacities are
  rounded up to buckets, so that few programs are compiled.

  Args:
    plan: the plan.
    retentions: retention of each row.
    prompts: the rows.
    geometry: sizes of the model.

  Raises:
    InputError: a row protects more tokens than it keeps.
  """
  lengths = prompts.known_lengths
  padded = prompts.tokens.shape[1]
  sizes = budget_sizes(plan, geometry)
  assert isinstance(plan.budget, Calibrated)
  counts, totals = [], []
  parts: list[Int[np.ndarray, "1 P"]] = []
  for row, share in enumerate(retentions):
    budget = Retention(float(share), plan.budget.rounding)
    row_plan = dataclasses.replace(plan, budget=budget)
    check_always_kept(row_plan, prompts.row(row), geometry)
    length = lengths[row : row + 1]
    counts.append(row_plan.spread.counts(budget, length, sizes))
    check_counts(plan.spread, counts[-1], sizes.layers, 1, even=True)
    totals.append(row_plan.spread.totals(budget, length, sizes))
    row_parts = row_plan.spread.parts(budget, length, padded)
    parts += [] if row_parts is None else [row_parts]
  kept = np.concatenate(counts, axis=1)
  slots = [min(bucket(int(most)), padded) for most in kept.max(axis=1)]
  together = np.concatenate(totals, axis=1)
  heads = np.array(sizes.heads, np.int64)[:, None]
  keeps_all = np.all(together >= heads * lengths, axis=1)
  shares = kept / lengths
  if not plan.spread.spreads_layers:
    shares = np.broadcast_to(retentions, kept.shape)
  return _assign_layers(
    plan,
    prompts,
    geometry,
    _Spread(
      kept,
      together,
      np.array(slots),
      keeps_all,
      shares,
      np.concatenate(parts) if parts else None,
    ),
  )


def prepare_repeated(
  plan: Plan, lengths: Int[np.ndarray, " B"], longest: int, geometry: Geometry
) -> PreparedPlan:
  """Prepares a plan that evicts between blocks or while decoding.

  A budget in tokens does not depend on the current length of a row. All
  compressed layers have the same budget.

  Args:
    plan: a plan that evicts more than once.
    lengths: lengths of the rows, of which a retention is a share.
    longest: upper bound of the final length of any row.
    geometry: sizes of the model.
  """
  budget, layers = plan.fixed_budget, len(geometry.layers)
  sizes = Sizes((1,), plan.method.traits.protects)
  counts = plan.spread.counts(budget, lengths, sizes)
  check_counts(plan.spread, counts, 1, len(lengths), even=True)
  if isinstance(budget, Tokens):
    # Rows go on growing, so their length so far is no limit.
    counts = np.full_like(counts, budget.count)
  capacity = min(plan.spread.capacity_between(budget, longest), longest)
  return PreparedPlan(
    np.tile(counts, (layers, 1)),
    totals=None,
    num_keys=None,
    parts=None,
    shares=None,
    weights=replicate(plan.method.load()),
    plan=plan,
    capacities=(capacity,) * layers,
    keeps_all=(False,) * layers,
    compressed=compressed_layers(plan, geometry),
  )


def max_span(
  plan: Plan, lengths: Int[np.ndarray, " B"], block: int
) -> Int[np.ndarray, " B"]:
  """Maximum distance between positions in rows of these lengths.

  With a method that renumbers tokens repeatedly, positions span at most the
  kept tokens and a block, and the length of a stream has no limit.
  """
  if plan.schedule.is_whole_prompt or not plan.method.traits.renumbers:
    return lengths
  sizes = Sizes((1,), plan.method.traits.protects)
  counts = plan.spread.counts(plan.fixed_budget, lengths, sizes)[0]
  # The sum may not fit 32 bits.
  return np.minimum(lengths, counts.astype(np.int64) + block)


def _round_capacities(slots: Int[np.ndarray, " C"]) -> Int[np.ndarray, " C"]:
  """Rounds capacities up to few values, so that few programs are compiled.

  For a pyramid over many layers, this adds a fourteenth of the range of its
  capacities on average.
  """
  if len(np.unique(slots)) <= _MOST_SIZES:
    return slots
  least, most = slots.min(), slots.max()
  step = -(-(most - least) // (_MOST_SIZES - 1))
  return np.minimum(least + -(-(slots - least) // step) * step, most)


def _assign_layers(
  plan: Plan, prompts: Prompts, geometry: Geometry, spread: _Spread
) -> PreparedPlan:
  """Assigns budgets to the layers; uncompressed ones keep everything."""
  lengths = prompts.known_lengths
  padded = prompts.tokens.shape[1]
  spread_layers = iter(zip(*spread[:5], strict=True))
  layers = []
  compressed = compressed_layers(plan, geometry)
  for spec, chosen in zip(geometry.layers, compressed, strict=True):
    heads, whole = kv_heads(plan, spec), np.ones(lengths.shape)
    uncompressed = (lengths, lengths * heads, padded, True, whole)
    share = next(spread_layers) if spec.compressible else uncompressed
    layers.append(share if chosen else uncompressed)
  kept, totals_by_layer, slots, keeps_all, shares = zip(*layers, strict=True)
  sparse = plan.sparse
  return PreparedPlan(
    np.array(kept, np.int32),
    np.array(totals_by_layer, np.int32),
    None if sparse is None else sparse.num_keys(lengths),
    None if spread.parts is None else spread.parts.astype(np.int32),
    np.array(shares, np.float32),
    plan,
    tuple(int(n) for n in slots),
    tuple(bool(w) for w in keeps_all),
    compressed,
    0 if sparse is None else sparse.max_keys(padded, lengths),
  )
