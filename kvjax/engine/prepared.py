"""A plan made ready: how many tokens and slots each layer and row gets."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.allocation.base import LayerBudget, Sizes
from kvjax.cache.layers import LayerCache
from kvjax.engine.plans import Plan
from kvjax.model import Geometry, LayerSpec
from kvjax.options.budgets import Retention, Tokens
from kvjax.prompts import Prompts, bucket
from kvjax.retrieval.base import Retrieval
from kvjax.struct import static, struct


@dataclasses.dataclass(frozen=True)
class LayerProgram:
  """What writing a compressed layer depends on when it is compiled.

  Methods and budgets that need the same sizes share a compiled program.

  Attributes:
    capacity: slots of the new cache per head.
    ragged: heads keep different numbers.
    per_query_head: every query head has keys of its own.
    recursive: the method goes on choosing while decoding.
    renumbers: tokens are numbered and rotated by their place in the cache.
    kv_dtype: what keys and values are rounded to, if they are.
    window: tokens of a local layer's ring; None for a global layer.
    retrieval: what indexes the layer, if anything does.
    max_keys: the most that any row looks up.
  """

  capacity: int
  ragged: bool = False
  per_query_head: bool = False
  recursive: bool = False
  renumbers: bool = False
  kv_dtype: str | None = None
  window: int | None = None
  retrieval: Retrieval | None = None
  max_keys: int = 0


@struct
class PreparedPlan:
  """A plan's budget, spread over the layers and rows of a batch.

  Attributes:
    counts: tokens that each head keeps, per layer of the model and row; where
      heads share out what a layer keeps, their mean.
    totals: tokens that all heads of a layer keep together.
    num_keys: keys that rows look up per token, if any.
    plan: the plan.
    capacities: per layer, the most that any row keeps per head.
    whole: per layer, whether no row has to lose anything.
    evicts: per layer, whether the method chooses there.
    max_keys: the most keys that any row looks up.
  """

  counts: Int[Array, "L B"] | Int[np.ndarray, "L B"]
  totals: Int[Array, "L B"] | Int[np.ndarray, "L B"]
  num_keys: Int[Array, " B"] | Int[np.ndarray, " B"] | None
  plan: Plan = static()
  capacities: tuple[int, ...] = static()
  whole: tuple[bool, ...] = static()
  evicts: tuple[bool, ...] = static()
  max_keys: int = static(default=0)

  def program(self, layer: int, spec: LayerSpec) -> LayerProgram:
    """What writing the layer is compiled for."""
    plan, capacity = self.plan, self.capacities[layer]
    if spec.window is not None:
      return LayerProgram(spec.window, window=spec.window)
    program = LayerProgram(
      capacity,
      ragged=plan.spread.ragged and not self.whole[layer],
      per_query_head=plan.per_query_head,
      recursive=plan.schedule.every is not None,
      renumbers=plan.method.traits.renumbers,
      kv_dtype=plan.kv_dtype,
    )
    sparse = plan.sparse
    if sparse is None or sparse.retrieval.is_dense(layer):
      return program
    return dataclasses.replace(
      program, retrieval=sparse.retrieval, max_keys=self.max_keys
    )

  def budget(
    self, layer: int, slots: int, protected: Bool[Array, "B P"] | None
  ) -> LayerBudget:
    """What the rows may keep of a layer.

    Args:
      layer: its number in the model.
      slots: T, of the prompt: choosing among them is compiled once, for
        whatever capacity is left.
      protected: by position, tokens that must be kept, if there are any.
    """
    plan = self.plan
    return LayerBudget(
      jnp.asarray(self.counts[layer]),
      slots,
      plan.fixed_budget if plan.schedule.every is not None else None,
      jnp.asarray(self.totals[layer]),
      protected,
    )


_ANY = Retention(1.0)
# Different capacities of the layers of a model.
_MOST_SIZES = 8


def prepare(plan: Plan, prompts: Prompts, geometry: Geometry) -> PreparedPlan:
  """Spreads a plan's budget over prompts that are compressed as a whole.

  Raises:
    InputError: a prompt protects more tokens than are kept.
  """
  lengths = np.asarray(prompts.lengths)
  padded = prompts.tokens.shape[1]
  check_protected(plan, prompts, geometry)
  budget, sizes = plan.fixed_budget, _sizes(plan, geometry)
  counts = plan.spread.counts(budget, lengths, sizes)
  totals = plan.spread.totals(budget, lengths, sizes)
  slots = plan.spread.capacities(budget, padded, sizes)
  whole = (slots >= padded) & np.all(counts >= lengths, axis=1)
  slots = _few_sizes(np.maximum(slots, counts.max(axis=1)))
  slots = np.minimum(slots, padded)
  return _by_layer(plan, prompts, geometry, counts, totals, (slots, whole))


def prepare_calibrated(
  plan: Plan,
  retentions: Float[np.ndarray, " B"],
  prompts: Prompts,
  geometry: Geometry,
) -> PreparedPlan:
  """The same for a budget that every row has its own retention of.

  Each row keeps what it would keep alone if its retention were asked for. The
  capacity is one of few, so that few programs are compiled.

  Args:
    plan: whose budget has been found.
    retentions: of the rows.
    prompts: the rows.
    geometry: the model's.

  Raises:
    InputError: a row protects more tokens than it keeps.
  """
  lengths = np.asarray(prompts.lengths)
  padded = prompts.tokens.shape[1]
  sizes = _sizes(plan, geometry)
  counts, totals = [], []
  for row, share in enumerate(retentions):
    own = dataclasses.replace(plan, budget=Retention(float(share)))
    check_protected(own, prompts.row(row), geometry)
    length = lengths[row : row + 1]
    counts.append(own.spread.counts(own.fixed_budget, length, sizes))
    totals.append(own.spread.totals(own.fixed_budget, length, sizes))
  each = np.concatenate(counts, axis=1)
  slots = [min(bucket(int(most)), padded) for most in each.max(axis=1)]
  whole = np.all(each >= lengths, axis=1)
  return _by_layer(
    dataclasses.replace(plan, budget=_ANY),
    prompts,
    geometry,
    each,
    np.concatenate(totals, axis=1),
    (np.array(slots), whole),
  )


@struct
class Limits:
  """What layers may hold from one eviction to the next.

  Attributes:
    counts: tokens that each head may hold, per row.
    plan: the method, its budget and schedule.
    capacity: the most that any row may hold.
  """

  counts: Int[Array, " B"]
  plan: Plan = static()
  capacity: int = static()

  def budget(self, protected: Bool[Array, "B P"] | None) -> LayerBudget:
    """The same for one layer: they all have equal shares."""
    return LayerBudget(
      self.counts,
      self.capacity,
      self.plan.fixed_budget,
      protected=protected,
    )

  def is_due(self, layer: LayerCache, budget: LayerBudget) -> Bool[Array, ""]:
    """Whether a layer holds more than it may.

    Holes, of rows that had less to append, take room too.
    """
    due = self.plan.spread.is_due(layer, budget)
    return due | (layer.cursor > budget.capacity)


def prepare_limits(
  plan: Plan, lengths: Int[np.ndarray, " B"], longest: int
) -> Limits:
  """What layers may hold while rows are fed block by block, or decoded.

  A budget in tokens is what it says, however short the row is so far.

  Args:
    plan: evicts more than once.
    lengths: tokens of the rows that a retention is a share of.
    longest: bound of what any row will have seen.
  """
  budget, sizes = plan.fixed_budget, Sizes((1,))
  counts = plan.spread.counts(budget, lengths, sizes)[0]
  if isinstance(budget, Tokens):
    counts = np.full_like(counts, budget.limit(longest))
  capacity = plan.spread.capacity_between(budget, longest)
  return Limits(jnp.asarray(counts), plan, min(capacity, longest))


def check_protected(plan: Plan, prompts: Prompts, geometry: Geometry) -> None:
  """Refuses prompts that protect more tokens than are kept.

  Raises:
    InputError: see `Allocation.check_protected`.
  """
  if prompts.protected is None or plan.method.traits.keeps_all:
    return
  rows = zip(prompts.protected, np.asarray(prompts.lengths), strict=True)
  for protected, length in rows:
    plan.spread.check_protected(
      protected[:length], plan.fixed_budget, _sizes(plan, geometry)
    )


def farthest(
  plan: Plan, lengths: Int[np.ndarray, " B"], block: int
) -> Int[np.ndarray, " B"]:
  """How far apart the tokens of rows of these lengths stand at most.

  What is rotated again and again stands no farther apart than what is held and
  a block: such a stream has no end.
  """
  if plan.schedule.whole or not plan.method.traits.renumbers:
    return lengths
  counts = plan.spread.counts(plan.fixed_budget, lengths, Sizes((1,)))[0]
  return np.minimum(lengths, counts + block)


def kv_heads(plan: Plan, spec: LayerSpec) -> int:
  """Heads that hold keys and values in a plan's cache."""
  return spec.heads if plan.per_query_head else spec.kv_heads


def compressed_layers(plan: Plan, geometry: Geometry) -> tuple[bool, ...]:
  """For each layer, whether the plan's method chooses in it."""
  return tuple(
    spec.compressible and not plan.method.traits.keeps_layer(layer)
    for layer, spec in enumerate(geometry.layers)
  )


def _sizes(plan: Plan, geometry: Geometry) -> Sizes:
  """The layers that share a budget, and their heads."""
  return Sizes(
    tuple(kv_heads(plan, s) for s in geometry.layers if s.compressible)
  )


def _few_sizes(slots: Int[np.ndarray, " C"]) -> Int[np.ndarray, " C"]:
  """Rounds capacities up to a few, so that few programs are compiled.

  That of a pyramid over many layers costs a fourteenth of its range on average.
  """
  if len(np.unique(slots)) <= _MOST_SIZES:
    return slots
  least, most = slots.min(), slots.max()
  step = -(-(most - least) // (_MOST_SIZES - 1))
  return np.minimum(least + -(-(slots - least) // step) * step, most)


def _by_layer(
  plan: Plan,
  prompts: Prompts,
  geometry: Geometry,
  counts: Int[np.ndarray, "C B"],
  totals: Int[np.ndarray, "C B"],
  room: tuple[Int[np.ndarray, " C"], Bool[np.ndarray, " C"]],
) -> PreparedPlan:
  """Gives each layer of the model its share; the others keep everything."""
  lengths = np.asarray(prompts.lengths, np.int32)
  padded = prompts.tokens.shape[1]
  shares = iter(zip(counts, totals, *room, strict=True))
  rows = []
  compressed = compressed_layers(plan, geometry)
  for spec, chosen in zip(geometry.layers, compressed, strict=True):
    everything = (lengths, lengths * kv_heads(plan, spec), padded, True)
    share = next(shares) if spec.compressible else everything
    rows.append(share if chosen else everything)
  each, together, slots, whole = zip(*rows, strict=True)
  sparse = plan.sparse
  return PreparedPlan(
    np.array(each, np.int32),
    np.array(together, np.int32),
    None if sparse is None else sparse.num_keys(lengths),
    plan,
    tuple(int(n) for n in slots),
    tuple(bool(w) for w in whole),
    compressed,
    0 if sparse is None else sparse.max_keys(padded, lengths),
  )
