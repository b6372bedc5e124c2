"""The step of prefill and decoding: append a block, then evict if due."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.base import Layer
from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache
from kvjax.engine.compress import arrange_for, evict_layer
from kvjax.engine.forward import Place, States, block_positions, run_layers
from kvjax.engine.model_layers import attach_rotation
from kvjax.engine.prepared import PreparedPlan
from kvjax.model import LayerSpec, Model


def feed(
  model: Model,
  params: PyTree,
  cache: Cache,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  prepared: PreparedPlan | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
  """Appends a block and returns the logits after each row's last token.

  Arguments are those of `append_block`.
  """
  hidden, cache = append_block(model, params, cache, tokens, lengths, prepared)
  # A row without tokens reads an arbitrary state, which nobody uses.
  last = jnp.maximum(lengths - 1, 0)[:, None, None]
  last = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
  return model.logits(params, last), cache


def append_block(
  model: Model,
  params: PyTree,
  cache: Cache,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  prepared: PreparedPlan | None = None,
) -> tuple[Float[Array, "B S E"], Cache]:
  """Appends a block of tokens, which attend to the cache and to each other.

  Args:
    model: the functions.
    params: the weights.
    cache: has room for the block.
    tokens: right-padded rows.
    lengths: tokens of each row, 0 for none.
    prepared: the plan, if layers evict later; the method then remembers what it
      needs of the block.

  Returns:
    Hidden states of the block, and the cache.
  """
  plan = None if prepared is None else prepared.plan
  # Layers that a method keeps whole have no memory for it.
  evicting = set()
  if prepared is not None:
    evicting = {
      stack
      for stack, evicts in zip(cache.order, prepared.compressed, strict=True)
      if evicts
    }

  def step(
    place: Place, stack: Layer, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], Layer]:
    arrange = arrange_for(activations, plan)
    output, stack = stack.step(place.rank, activations, arrange)
    if plan is not None and place.stack in evicting:
      # Methods see one layer; `put` writes only what the method changed.
      view: Any = stack.at(place.rank)
      with jax.default_matmul_precision("highest"):
        after: Any = plan.method.observe(
          place.layer, view, plan.candidates(activations)
        )
      stack = stack.put(place.rank, view, after)
    return output, stack

  positions = block_positions(cache.next_positions, tokens.shape[1], lengths)
  hidden, stacks = run_layers(
    model, params, tokens, positions, States(cache.stacks, cache.order), step
  )
  return hidden, dataclasses.replace(
    cache, stacks=stacks, next_positions=cache.next_positions + lengths
  )


def evict_all(model: Model, prepared: PreparedPlan, cache: Cache) -> Cache:
  """Evicts from every layer that exceeds its budget.

  Args:
    model: the model.
    prepared: a plan that evicts more than once.
    cache: the cache; its capacity stays the same.
  """
  stacks = list(cache.stacks)
  for number, stack in enumerate(stacks):
    layers = [n for n, index in enumerate(cache.order) if index == number]
    if not prepared.compressed[layers[0]]:
      continue
    spec = model.geometry.layers[layers[0]]
    numbers = jnp.asarray(layers, jnp.int32)

    def one_layer(
      index: Int[Array, ""],
      stack: Any,
      # Defaults bind the values of this pass of the loop.
      numbers: Array = numbers,
      spec: LayerSpec = spec,
    ) -> Any:
      layer: LayerCache = stack.at(index)
      block = _empty_block(model, prepared, layer, spec)
      number, capacity = numbers[index], min(prepared.capacity, layer.capacity)
      budget = prepared.budget(number, capacity, cache.protected)

      def evict(layer: LayerCache) -> LayerCache:
        return evict_layer(prepared.plan, number, layer, block, budget)

      due = prepared.is_due(layer, budget)
      # Nothing is scored unless a row is due.
      after = jax.lax.cond(due, evict, lambda same: same, layer)
      return stack.put(index, layer, after)

    stacks[number] = jax.lax.fori_loop(0, len(layers), one_layer, stack)
  return dataclasses.replace(cache, stacks=tuple(stacks))


def _empty_block(
  model: Model, prepared: PreparedPlan, cache: LayerCache, spec: LayerSpec
) -> Activations:
  """Makes activations of a layer for a block without tokens.

  They have what the plan's method requests of the model.
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
  names = prepared.plan.activations
  return attach_rotation(model, spec, block).only(names)
