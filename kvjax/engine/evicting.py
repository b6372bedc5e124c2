"""Evictions from a cache, between blocks of a prompt and while decoding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from kvjax.activations import Activations
from kvjax.allocation.base import LayerBudget
from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache
from kvjax.engine.compression_plan import Plan
from kvjax.engine.joined_selection import select_joined
from kvjax.engine.model_layers import attach_rotation
from kvjax.engine.prepared import PreparedPlan
from kvjax.errors import blamed_on
from kvjax.model import LayerSpec, Model


def evict_all(model: Model, prepared: PreparedPlan, cache: Cache) -> Cache:
  """Evicts from every layer that exceeds its budget.

  Args:
    model: the model.
    prepared: a plan that evicts more than once.
    cache: the cache; its capacity stays the same.
  """
  if prepared.plan.method.traits.joins_layers:
    return _evict_joined(model, prepared, cache)
  stacks = list(cache.stacks)
  for number, layers in _evicting(prepared, cache).items():
    spec = model.geometry.layers[layers[0]]
    numbers = jnp.asarray(layers, jnp.int32)

    def one_layer(
      index: Int[Array, ""],
      stack: Any,
      # Defaults bind the values of this pass of the loop.
      numbers: Array = numbers,
      spec: LayerSpec = spec,
    ) -> Any:
      view: LayerCache = stack.at(index)
      number, capacity = numbers[index], min(prepared.capacity, view.capacity)
      budget = prepared.budget(number, capacity, cache.protected)

      def evict(stack: Any) -> Any:
        layer: LayerCache = stack.at(index)
        block = _empty_block(model, prepared, layer, spec)
        after = _evict_layer(prepared.plan, number, layer, block, budget)
        return stack.put(index, layer, after)

      # Unless a row is due, nothing is scored, and no keys are read or written.
      due = prepared.is_due(view, budget)
      return jax.lax.cond(due, evict, lambda same: same, stack)

    stack = stacks[number]
    stacks[number] = jax.lax.fori_loop(0, len(layers), one_layer, stack)
  return dataclasses.replace(cache, stacks=tuple(stacks))


def _evicting(prepared: PreparedPlan, cache: Cache) -> dict[int, list[int]]:
  """The layers of each stack that evicts, by the stack's number."""
  members: dict[int, list[int]] = {}
  for layer, number in enumerate(cache.order):
    if number >= 0 and prepared.compressed[layer]:
      members.setdefault(number, []).append(layer)
  return members


def _evict_joined(model: Model, prepared: PreparedPlan, cache: Cache) -> Cache:
  """Evicts the same tokens from all layers, by their joined scores.

  Of all layers at a time, only the scores exist.
  """
  stacks: list[Any] = list(cache.stacks)
  members = _evicting(prepared, cache)
  if not members:
    return cache
  number, layers = next(iter(members.items()))
  first: LayerCache = stacks[number].at(0)
  capacity = min(prepared.capacity, first.capacity)
  source = jnp.asarray(layers[0], jnp.int32)
  budget = prepared.budget(source, capacity, cache.protected)

  def select() -> Int[Array, "B K M"]:
    scores = _evaluate_all(model, prepared, cache)
    method = prepared.plan.method
    return select_joined(method, scores, first, budget)[..., :capacity]

  # All layers have the same tokens, so that all are due, or none.
  due = prepared.is_due(first, budget)
  none = jnp.full((*first.positions.shape[:2], capacity), -1, jnp.int32)
  slots = jax.lax.cond(due, select, lambda: none)

  def keep(index: Int[Array, ""], stack: Any) -> Any:
    def put(stack: Any) -> Any:
      layer: LayerCache = stack.at(index)
      return stack.put(index, layer, _keep(layer, slots))

    return jax.lax.cond(due, put, lambda same: same, stack)

  for number, layers in members.items():
    stacks[number] = jax.lax.fori_loop(0, len(layers), keep, stacks[number])
  return dataclasses.replace(cache, stacks=tuple(stacks))


def _evaluate_all(
  model: Model, prepared: PreparedPlan, cache: Cache
) -> PyTree[Array]:
  """Evaluates all layers that evict, one after another, stack by stack."""
  by_stack = []
  for number, layers in _evicting(prepared, cache).items():
    stack: Any = cache.stacks[number]
    spec = model.geometry.layers[layers[0]]

    def one_layer(
      place: tuple[Int[Array, ""], Int[Array, ""]],
      # Defaults bind the values of this pass of the loop.
      stack: Any = stack,
      spec: LayerSpec = spec,
    ) -> PyTree[Array]:
      index, layer = place
      view: LayerCache = stack.at(index)
      block = _empty_block(model, prepared, view, spec)
      return _evaluate(prepared.plan, layer, view, block)

    index = jnp.arange(len(layers), dtype=jnp.int32)
    places = index, jnp.asarray(layers, jnp.int32)
    by_stack.append(jax.lax.map(one_layer, places))
  return jax.tree.map(lambda *each: jnp.concatenate(each), *by_stack)


def _evict_layer(
  plan: Plan,
  layer: Int[Array, ""],
  cache: LayerCache,
  activations: Activations,
  budget: LayerBudget,
) -> LayerCache:
  """Evicts from a layer down to its budget.

  Args:
    plan: a plan that evicts more than once.
    layer: index of the layer in the model.
    cache: the layer's cache.
    activations: a block without tokens; the method remembers in the cache what
      it needs of earlier blocks.
    budget: budget of the layer.

  Returns:
    A cache of the same capacity, with its tokens in the first slots.
  """
  scores = _evaluate(plan, layer, cache, activations)
  with blamed_on(plan.method):
    slots = plan.spread.select(plan.method, scores, cache, budget)
  return _keep(cache, slots[..., : budget.capacity])


def _evaluate(
  plan: Plan, layer: Int[Array, ""], cache: LayerCache, activations: Activations
) -> PyTree[Array]:
  """Computes what an eviction from a layer depends on; see `_evict_layer`."""
  with blamed_on(plan.method), jax.default_matmul_precision("highest"):
    return plan.spread.evaluate(plan.method, layer, cache, activations)


def _keep(cache: LayerCache, slots: Int[Array, "B K M"]) -> LayerCache:
  """Moves what is kept to the first slots of a cache of the same capacity."""
  kept = cache.take(slots)
  # The loops of prefill and decoding carry layers of one shape.
  return kept.grow(cache.capacity - kept.capacity)


def _empty_block(
  model: Model, prepared: PreparedPlan, cache: LayerCache, spec: LayerSpec
) -> Activations:
  """Makes activations of a layer for a block without tokens.

  They have what the plan's method needs of the model in every eviction.
  """
  batch, kv_heads, _, dim = cache.keys.shape
  keys = jnp.zeros((batch, kv_heads, 0, dim), cache.keys.dtype)
  width = cache.values.shape[-1]
  sinks = None if cache.window is None else cache.window.sinks
  block = Activations(
    queries=jnp.zeros((batch, spec.heads, 0, dim), cache.keys.dtype),
    keys=keys,
    values=jnp.zeros((batch, kv_heads, 0, width), cache.values.dtype),
    positions=jnp.zeros((batch, 0), jnp.int32),
    # They are stored once per row.
    sinks=None if sinks is None else sinks[0],
    attention=spec.attention,
    weights=prepared.weights,
  )
  names = prepared.plan.method.traits.always
  return attach_rotation(model, spec, block).only(names)
