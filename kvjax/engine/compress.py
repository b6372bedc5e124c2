"""What happens to a layer's cache: evaluate, select, keep, finalize."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation, LayerBudget, Uniform
from kvjax.cache.base import Layer
from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache
from kvjax.cache.observation import ObservationWindow
from kvjax.cache.packed import PackedLayer
from kvjax.cache.sharding import shard_layer, shard_stack
from kvjax.cache.sparse import SparseLayer
from kvjax.cache.window import WindowLayer
from kvjax.engine.plans import Plan
from kvjax.engine.prepared import LayerProgram, Limits
from kvjax.engine.rerotation import close_up, rerotate
from kvjax.methods.base import Method
from kvjax.model import LayerSpec, Model
from kvjax.struct import struct


class Evaluation(NamedTuple):
  """What is evaluated once, whatever the number of plans that need it.

  Attributes:
    method: whose scores they are.
    allocation: what heads compete by, where they do.
    per_query_head: whether each query head holds keys of its own.
    recursive: whether the method must remember what it saw, to go on.
  """

  method: Method
  allocation: Allocation
  per_query_head: bool
  recursive: bool

  @classmethod
  def of(cls, plan: Plan) -> "Evaluation":
    """What a plan needs."""
    spread = plan.spread
    return cls(
      plan.method,
      spread if spread.votes else Uniform(),
      plan.per_query_head,
      plan.schedule.every is not None,
    )


@struct
class Evaluated:
  """What a method found in a layer, and what it remembers of it.

  Attributes:
    scores: what the choice depends on.
    received: see `LayerCache`.
    window: likewise.
  """

  scores: PyTree[Array]
  received: Float[Array, "B K T"] | None
  window: ObservationWindow | None

  def remembered(self) -> "Evaluated | None":
    """What is remembered alone, if anything is."""
    if self.received is None and self.window is None:
      return None
    return dataclasses.replace(self, scores=None)


@functools.partial(jax.jit, static_argnames=("evaluation", "scored"))
def evaluate_layer(
  evaluation: Evaluation,
  layer: Int[Array, ""],
  activations: Activations,
  *,
  scored: bool = True,
) -> Evaluated:
  """What a method finds in a prompt; in float32 on every backend.

  Args:
    evaluation: the method.
    layer: number of the layer in the model.
    activations: the prompt.
    scored: whether anybody chooses by it; else it only remembers.
  """
  cache, activations = _candidates(evaluation.per_query_head, activations)
  method, scores = evaluation.method, None
  with jax.default_matmul_precision("highest"):
    if evaluation.recursive:
      cache = method.observe(layer, cache, activations)
    if scored:
      scores = evaluation.allocation.evaluate(method, layer, cache, activations)
  return Evaluated(scores, cache.received, cache.window)


@functools.partial(jax.jit, static_argnames=("evaluation",))
def select_layer(
  evaluation: Evaluation,
  activations: Activations,
  evaluated: Evaluated,
  budget: LayerBudget,
) -> Int[Array, "B K T"]:
  """Slots of a prompt that a method keeps, ascending, then -1.

  Args:
    evaluation: the method.
    activations: the prompt.
    evaluated: what the method has found in it.
    budget: how many; its capacity is T.
  """
  cache, _ = _candidates(evaluation.per_query_head, activations)
  cache = _remember(cache, evaluated)
  allocation, method = evaluation.allocation, evaluation.method
  return allocation.select(method, evaluated.scores, cache, budget)


class Kept(NamedTuple):
  """What a layer of a prompt becomes a cache of; arrays alone.

  Attributes:
    layer: number of the layer in the model.
    activations: of the prompt.
    evaluated: what the method remembers, if anything.
    slots: those to keep, ascending, then -1; None for all.
    num_keys: keys that the rows look up, if any.
  """

  layer: Int[Array, ""]
  activations: Activations
  evaluated: Evaluated | None
  slots: Int[Array, "B K T"] | None
  num_keys: Int[Array, " B"] | None


def compress_layer(model: Model, program: LayerProgram, kept: Kept) -> Layer:
  """A layer of a prompt as its plan keeps it, in its final form.

  Args:
    model: turns keys where the method renumbers them.
    program: what is compiled.
    kept: the layer.
  """
  if program.window is not None:
    return shard_layer(WindowLayer.of(kept.activations, program.window))
  cache, activations = _candidates(program.per_query_head, kept.activations)
  if kept.evaluated is not None:
    cache = _remember(cache, kept.evaluated)
  if program.ragged:
    assert kept.slots is not None
    heads = cache.positions.shape[1]
    packed = PackedLayer.of(cache, kept.slots, heads * program.capacity)
    return shard_layer(_quantize(packed, program.kv_dtype))
  if kept.slots is not None:
    cache = cache.take(kept.slots[..., : program.capacity])
  if program.recursive:
    return shard_layer(cache)
  if program.retrieval is not None:
    assert kept.num_keys is not None
    sparse = SparseLayer.of(
      program.retrieval,
      kept.layer,
      cache,
      activations,
      kept.num_keys,
      program.max_keys,
    )
    return shard_layer(sparse)
  return shard_layer(
    finalize_layer(model, program.renumbers, program.kv_dtype, cache)
  )


@functools.partial(
  jax.jit, static_argnames=("model", "program"), donate_argnames=("stack",)
)
def keep_layer(
  stack: Layer,
  index: Int[Array, ""],
  kept: Kept,
  *,
  model: Model,
  program: LayerProgram,
) -> Layer:
  """Writes a compressed layer into its stack, which is consumed."""
  layer = compress_layer(model, program, kept).offload()
  write = jax.lax.dynamic_update_index_in_dim
  stack = jax.tree.map(lambda x, y: write(x, y, index, 0), stack, layer)
  return shard_stack(stack)


@functools.partial(jax.jit, static_argnames=("model", "program"))
def keep_alone(kept: Kept, *, model: Model, program: LayerProgram) -> Layer:
  """A compressed layer as a stack of its own."""
  layer = compress_layer(model, program, kept)
  stack: Layer = jax.tree.map(lambda x: x[None], layer)
  return shard_stack(stack).offload()


def finalize_layer(
  model: Model, renumbers: bool, kv_dtype: str | None, layer: LayerCache
) -> Layer:
  """A layer as it lasts, its method having chosen for the last time.

  Args:
    model: turns keys.
    renumbers: whether it does.
    kv_dtype: what keys and values are rounded to, if they are.
    layer: what is left, as it was computed.
  """
  if renumbers:
    layer = rerotate(model, layer)
  return _quantize(layer, kv_dtype)


def _quantize(layer: Layer, kv_dtype: str | None) -> Layer:
  return layer if kv_dtype is None else layer.quantize(kv_dtype)


def finalize_cache(
  plan: Plan,
  stacks: tuple[Layer, ...],
  order: tuple[int, ...],
  lengths: Int[Array, " B"],
  protected: Bool[Array, "B P"] | None,
) -> Cache:
  """The cache of rows of these lengths.

  It goes on evicting only if its plan does. Where the method has renumbered
  tokens for good the next one follows the last that is kept; all heads of all
  layers keep as many then.
  """
  if plan.schedule.every is not None:
    return Cache(stacks, lengths, protected, order, plan)
  if plan.method.traits.renumbers:
    lengths = stacks[0].lengths[0, :, 0]
  return Cache(stacks, lengths, None, order)


def evict_layer(
  limits: Limits,
  layer: Int[Array, ""],
  cache: LayerCache,
  activations: Activations,
  budget: LayerBudget,
) -> LayerCache:
  """Compresses a layer to its limits; its tokens come first then.

  Args:
    limits: what it may hold.
    layer: number of the layer in the model.
    cache: the candidates.
    activations: a block of padding: what the method needs of what it saw, it
      remembers in the cache.
    budget: what `limits` say of one layer.

  Returns:
    A cache of the same capacity.
  """
  plan = limits.plan
  with jax.default_matmul_precision("highest"):
    scores = plan.method.evaluate(layer, cache, activations)
  slots = plan.spread.select(plan.method, scores, cache, budget)
  kept = cache.take(slots[..., : budget.capacity])
  return kept.grow(cache.capacity - kept.capacity)


def arrange_for(model: Model, plan: Plan | None) -> Any:
  """What attention reads in place of a layer that evicts; None for itself."""
  if plan is None or not plan.method.traits.renumbers:
    return None
  return functools.partial(close_up, model)


def _candidates(
  per_query_head: bool, activations: Activations
) -> tuple[LayerCache, Activations]:
  if per_query_head:
    activations = activations.with_kv_heads(activations.queries.shape[1])
  return LayerCache.of(activations), activations


def _remember(cache: LayerCache, evaluated: Evaluated) -> LayerCache:
  return LayerCache(
    cache.keys,
    cache.values,
    cache.positions,
    cache.cursor,
    evaluated.received,
    evaluated.window,
  )


def padding_like(cache: LayerCache, spec: LayerSpec) -> Activations:
  """A block of one token of padding, as a layer would project it."""
  batch, kv_heads, _, dim = cache.keys.shape
  keys = jnp.zeros((batch, kv_heads, 1, dim), cache.keys.dtype)
  width = cache.values.shape[-1]
  return Activations(
    queries=jnp.zeros((batch, spec.heads, 1, dim), cache.keys.dtype),
    keys=keys,
    values=jnp.zeros((batch, kv_heads, 1, width), cache.values.dtype),
    positions=jnp.full((batch, 1), -1, jnp.int32),
    attention=spec.attention,
  )
