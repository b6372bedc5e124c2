"""A prepared plan: the tokens and slots of each layer and row."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.allocation.base import LayerBudget
from kvjax.cache.layers import LayerCache
from kvjax.cache.sharding import heads_fill_mesh
from kvjax.engine.compression_plan import Plan
from kvjax.engine.layer_budgets import kv_heads
from kvjax.methods.channels import Channels
from kvjax.model import LayerSpec
from kvjax.retrieval.base import Retrieval
from kvjax.struct import static, struct


@dataclasses.dataclass(frozen=True)
class LayerProgram:
  """The static arguments of the program that compresses a layer.

  Methods and budgets that need the same sizes share a compiled program.

  Attributes:
    capacity: slots of the new cache per head.
    ragged: whether heads keep different numbers of tokens.
    paged: whether pages share slots out over more devices than heads can be.
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


def waits(plan: Plan) -> bool:
  """Whether a plan's scores or shares are those of the whole forward pass."""
  traits = plan.method.traits
  late = traits.replay is not None or traits.joins_layers
  return late or plan.spread.whole_model


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
    weights: what a method that evicts repeatedly has in files.
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
  weights: PyTree[Array] = None

  @property
  def waits(self) -> bool:
    """Whether it evicts, and only after the whole forward pass."""
    return waits(self.plan) and not all(self.keeps_all)

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
      paged=in_pages(plan, spec),
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


def in_pages(plan: Plan, spec: LayerSpec) -> bool:
  """Whether pages share a layer out over more devices than heads can be."""
  return plan.pageable and not heads_fill_mesh(kv_heads(plan, spec))


@jax.jit
def _unstack(parts: Any, arrays: PyTree) -> tuple[Any, list[PyTree]]:
  """Cuts arrays into those of each layer, of which a sweep has thousands.

  With them, `parts` gets to the device.
  """
  layers = range(len(jax.tree.leaves(arrays)[0]))
  return parts, [jax.tree.map(operator.itemgetter(n), arrays) for n in layers]
