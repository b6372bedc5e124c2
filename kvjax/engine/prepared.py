"""Preparation of a plan: the tokens and slots of each layer and row."""

import dataclasses
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.allocation.base import LayerBudget, Sizes
from kvjax.cache.layers import LayerCache
from kvjax.cache.sharding import heads_fill_mesh
from kvjax.calibration.record import Calibrated
from kvjax.engine.layer_budgets import (
  budget_sizes,
  by_layer,
  check_counts,
  check_protected,
  compressed_layers,
  kv_heads,
  layer_budgets,
)
from kvjax.engine.plans import Plan
from kvjax.methods.channels import Channels
from kvjax.model import Geometry, LayerSpec
from kvjax.options.budgets import Retention, Tokens
from kvjax.prompts import Prompts, bucket
from kvjax.retrieval.base import Retrieval
from kvjax.struct import static, struct


@dataclasses.dataclass(frozen=True)
class LayerProgram:
  """The static arguments of the program that compresses a layer.

  Methods and budgets that need the same sizes share a compiled program.

  Attributes:
    capacity: slots of the new cache per head.
    ragged: whether heads keep different numbers of tokens.
    paged: whether pages are shared out over more devices than heads can be.
    per_query_head: whether every query head stores its own keys.
    recursive: whether the method evicts while decoding.
    renumbers: spec of the layer, if its tokens are numbered anew.
    kv_dtype: dtype to quantize keys and values to, if any.
    window: window of a sliding-window layer; None for a global layer.
    retrieval: retrieval method of the layer, if any.
    max_keys: maximum number of keys that any row retrieves.
    pool: pages per layer, if all layers share a pool; else 0.
    channels: channels of the keys that are stored; None for all.
  """

  capacity: int
  ragged: bool = False
  paged: bool = False
  per_query_head: bool = False
  recursive: bool = False
  renumbers: LayerSpec | None = None
  kv_dtype: str | None = None
  window: int | None = None
  retrieval: Retrieval | None = None
  max_keys: int = 0
  pool: int = 0
  channels: Channels | None = None


@struct
class PreparedPlan:
  """A plan's budget, spread over the layers and rows of a batch.

  Attributes:
    counts: tokens that each head keeps, per layer of the model and row; the
      mean over the heads if they share the budget of a layer.
    totals: tokens that all heads of a layer keep together; None for the sum of
      their counts.
    num_keys: keys that rows retrieve per token, for retrieval methods.
    parts: tokens that each head keeps of the parts of a row, if the allocation
      counts by parts.
    shares: share of the tokens that rows are to keep, before rounding; None for
      that of the counts.
    plan: the plan.
    capacities: per layer, the maximum that any row keeps per head.
    keeps_all: per layer, whether no row has to evict anything.
    compressed: per layer, whether the method evicts there.
    max_keys: maximum number of keys that any row retrieves.
    pool: pages per layer, if layers share a pool of them; else 0.
  """

  counts: Int[Array, "L B"] | Int[np.ndarray, "L B"]
  totals: Int[Array, "L B"] | Int[np.ndarray, "L B"] | None
  num_keys: Int[Array, " B"] | Int[np.ndarray, " B"] | None
  parts: Int[Array, "B C"] | Int[np.ndarray, "B C"] | None
  shares: Float[Array, "L B"] | Float[np.ndarray, "L B"] | None
  plan: Plan = static()
  capacities: tuple[int, ...] = static()
  keeps_all: tuple[bool, ...] = static()
  compressed: tuple[bool, ...] = static()
  max_keys: int = static(default=0)
  pool: int = static(default=0)

  @property
  def waits(self) -> bool:
    """Whether scores are known only after the whole forward pass."""
    plan = self.plan
    late = plan.spread.whole_model or plan.method.traits.replay is not None
    return late and not all(self.keeps_all)

  def evicts(self, layer: int) -> tuple[bool, bool]:
    """Whether a layer evicts from the prompt, and while decoding."""
    later = self.plan.while_decoding
    return (
      self.compressed[layer],
      later is not None and not later.method.traits.keeps_layer(layer),
    )

  def program(self, layer: int, spec: LayerSpec) -> LayerProgram:
    """Returns the static arguments of a layer's program."""
    plan, traits = self.plan, self.plan.method.traits
    if spec.window is not None:
      return LayerProgram(spec.window, window=spec.window)
    program = LayerProgram(
      self.capacities[layer],
      ragged=plan.spread.ragged and not self.keeps_all[layer],
      paged=plan.pageable and not heads_fill_mesh(kv_heads(plan, spec)),
      per_query_head=plan.per_query_head,
      recursive=plan.while_decoding is not None,
      renumbers=spec if traits.renumbers else None,
      kv_dtype=plan.kv_dtype,
      pool=0 if self.keeps_all[layer] else self.pool,
      channels=traits.channels,
    )
    sparse = plan.sparse
    if sparse is None or sparse.retrieval.is_dense(layer):
      return program
    return dataclasses.replace(
      program, retrieval=sparse.retrieval, max_keys=self.max_keys
    )

  @property
  def capacity(self) -> int:
    """Maximum that any row keeps per head of any compressed layer."""
    layers = zip(self.capacities, self.compressed, strict=True)
    return max((size for size, evicts in layers if evicts), default=0)

  def budget(
    self,
    layer: Int[Array, ""],
    slots: int,
    protected: Bool[Array, "B P"] | None,
  ) -> LayerBudget:
    """Returns the budget of a layer, in a program for many layers.

    Args:
      layer: index of the layer in the model.
      slots: slots of the new cache.
      protected: by position, tokens that must be kept, if there are any.
    """
    parts, arrays = jax.tree.map(jnp.asarray, (self.parts, self._arrays))
    of_layer = jax.tree.map(lambda x: x[layer], arrays)
    return self._with(slots, protected, parts, of_layer)

  def budgets(
    self, slots: int, protected: Bool[Array, "B P"] | None
  ) -> list[LayerBudget]:
    """Returns the budgets of all layers.

    Args:
      slots: slots of the new caches. After a prompt, T serves as the capacity,
        so that one compiled program selects for all budgets.
      protected: by position, tokens that must be kept, if there are any.
    """
    parts, of_layers = _unstack(self.parts, self._arrays)
    return [self._with(slots, protected, parts, each) for each in of_layers]

  @property
  def _arrays(self) -> tuple[Any, Any, Any]:
    return self.counts, self.totals, self.shares

  def _with(
    self,
    slots: int,
    protected: Bool[Array, "B P"] | None,
    parts: Any,
    of_layer: tuple[Any, Any, Any],
  ) -> LayerBudget:
    counts, total, share = of_layer
    plan = self.plan
    return LayerBudget(
      counts,
      slots,
      None if plan.schedule.is_whole_prompt else plan.fixed_budget,
      total,
      protected,
      parts,
      share,
    )

  def is_due(self, layer: LayerCache, budget: LayerBudget) -> Bool[Array, ""]:
    """Whether a layer exceeds its budget while decoding or between blocks.

    Empty slots between tokens, of rows that had less to append, count as well.
    """
    due = self.plan.spread.is_due(layer, budget)
    return due | (layer.cursor > budget.capacity)


@jax.jit
def _unstack(parts: Any, arrays: PyTree) -> tuple[Any, list[PyTree]]:
  """Cuts arrays into those of each layer, of which a sweep has thousands.

  With them, `parts` gets to the device.
  """
  layers = range(len(jax.tree.leaves(arrays)[0]))
  return parts, [jax.tree.map(operator.itemgetter(n), arrays) for n in layers]


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
  check_protected(plan, prompts, geometry)
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
    check_protected(row_plan, prompts.row(row), geometry)
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
  counts = plan.spread.counts(budget, lengths, Sizes((1,)))
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
  counts = plan.spread.counts(plan.fixed_budget, lengths, Sizes((1,)))[0]
  return np.minimum(lengths, counts + block)


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
    spread.parts,
    np.array(shares, np.float32),
    plan,
    tuple(int(n) for n in slots),
    tuple(bool(w) for w in keeps_all),
    compressed,
    0 if sparse is None else sparse.max_keys(padded, lengths),
  )
