"""Prefill block by block, in a fixed amount of memory."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.base import Layer
from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache
from kvjax.cache.sharding import shard_stack
from kvjax.cache.window import WindowLayer
from kvjax.engine.compress import finalize_cache, finalize_layer
from kvjax.engine.compression_plan import Plan
from kvjax.engine.evicting import evict_all
from kvjax.engine.feed import append_block, observe
from kvjax.engine.forward import attend_to_prompt
from kvjax.engine.model_layers import index_layer, layer_stacks, run_block
from kvjax.engine.prepared import LayerProgram, PreparedPlan, in_pages
from kvjax.engine.preparing import prepare_repeated
from kvjax.model import Geometry, LayerSpec, Model
from kvjax.prompts import Prompts


def prefill_blocks(
  model: Model, params: PyTree, prompts: Prompts, plan: Plan
) -> tuple[Cache, Float[Array, "B V"]]:
  """Prefills prompts in blocks of `plan.schedule.block` tokens.

  A layer never contains more tokens than its budget and one block. Arguments
  and results are those of `kvjax.prefill`.
  """
  lengths = prompts.known_lengths
  longest = prompts.tokens.shape[1]
  prepared = prepare_repeated(plan, lengths, longest, model.geometry)
  protected = prompts.protected
  return _prefill_blocks(
    model,
    params,
    jnp.asarray(prompts.tokens),
    jnp.asarray(lengths, jnp.int32),
    prepared,
    None if protected is None else jnp.asarray(protected),
  )


@functools.partial(jax.jit, static_argnames=("model",))
def _prefill_blocks(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  prepared: PreparedPlan,
  protected: Bool[Array, "B S"] | None,
) -> tuple[Cache, Float[Array, "B V"]]:
  plan, padded = prepared.plan, tokens.shape[1]
  schedule = plan.schedule
  assert schedule.block is not None
  block = min(schedule.block, padded)
  first = min(schedule.first or block, padded)
  # Whole blocks: a slice at the end would otherwise be moved back to fit.
  tokens = jnp.pad(tokens, ((0, 0), (0, -(padded - first) % block)))

  def run(
    cache: Cache, start: Int[Array, ""], width: int
  ) -> tuple[Cache, Float[Array, "B E"]]:
    """Runs a block; returns the hidden state of each row's last token."""
    part = jax.lax.dynamic_slice_in_dim(tokens, start, width, axis=1)
    real = jnp.clip(lengths - start, 0, width)
    hidden, cache = append_block(model, params, cache, part, real, prepared)
    # Rows that have ended read an arbitrary state, which `next_block` drops.
    last = jnp.maximum(real - 1, 0)[:, None, None]
    last = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    return evict_all(model, prepared, cache), last

  def next_block(
    index: Int[Array, ""], carry: tuple[Cache, Float[Array, "B E"]]
  ) -> tuple[Cache, Float[Array, "B E"]]:
    cache, last = carry
    start = first + index * block
    cache, block_last = run(cache, start, block)
    return cache, jnp.where((lengths > start)[:, None], block_last, last)

  # Every block but the first meets a layer that was evicted to its budget.
  # Layers that keep everything also hold the padding of the last block.
  capacity = max(prepared.capacity + block, first)
  kinds = _kinds(model.geometry, prepared, (capacity, padded + block))
  unique = [kind for kind in dict.fromkeys(kinds) if kind is not None]
  order = tuple(-1 if kind is None else unique.index(kind) for kind in kinds)
  rows = lengths.shape[0]
  empty = Cache(
    tuple(
      _empty_stack(model, params, prepared, kind, (kinds.count(kind), rows))
      for kind in unique
    ),
    jnp.zeros_like(lengths),
    protected,
    order,
  )
  carry = run(empty, jnp.zeros((), jnp.int32), first)
  # Rounded up. A traced number: all lengths of a bucket share the program.
  blocks = -((first - jnp.max(lengths)) // block)
  cache, last = jax.lax.fori_loop(0, jnp.maximum(blocks, 0), next_block, carry)
  stacks = tuple(
    _finalize(
      model,
      plan,
      kind.spec,
      stack,
      prepared.capacity if kind.evicts else padded,
    )
    for stack, kind in zip(cache.stacks, unique, strict=True)
  )
  logits = model.logits(params, last)
  return finalize_cache(plan, stacks, order, lengths, protected), logits


class _Kind(NamedTuple):
  """The properties that layers of one stack have in common.

  Attributes:
    spec: spec of the layers.
    evicts: whether the method compresses them.
    capacity: slots during prefill.
  """

  spec: LayerSpec
  evicts: bool
  capacity: int


def _kinds(
  geometry: Geometry, prepared: PreparedPlan, capacities: tuple[int, int]
) -> list[_Kind | None]:
  """Returns the kind of each layer; None for a layer without a cache.

  Args:
    geometry: sizes of the model.
    prepared: the plan.
    capacities: slots of layers that evict, and of those that do not.
  """
  return [
    _Kind(spec, evicts, capacities[0] if evicts else capacities[1])
    if spec.cache
    else None
    for spec, evicts in zip(geometry.layers, prepared.compressed, strict=True)
  ]


def _empty_stack(
  model: Model,
  params: PyTree,
  prepared: PreparedPlan,
  kind: _Kind,
  sizes: tuple[int, int],
) -> Layer:
  """Makes a stack of empty layers, including what the method will remember.

  Args:
    model: the functions.
    params: the weights.
    prepared: the plan.
    kind: kind of the layers.
    sizes: number of layers and of rows.
  """
  count, rows = sizes

  def first_token(params: PyTree) -> Layer:
    """A layer's cache after one token; only its shapes are used."""
    token = jnp.zeros((rows, 1), jnp.int32)
    hidden, shared = model.embed(params, token, token)
    weights = index_layer(layer_stacks(model, params)[kind.spec.weights], 0)

    def attend(
      activations: Activations,
    ) -> tuple[Float[Array, "B N S Dv"], Activations]:
      return attend_to_prompt(activations), activations

    _, activations = run_block(
      model, weights, kind.spec, hidden, shared, token, attend
    )
    if kind.spec.window is not None:
      return WindowLayer.of(activations, kind.spec.window)
    cache = LayerCache.of(prepared.plan.candidates(activations))
    if kind.evicts:
      cache = observe(prepared, jnp.int32(0), cache, activations)
    # It holds one token already.
    return cache.grow(kind.capacity - 1)

  shapes = jax.eval_shape(first_token, params)
  stack: Layer = jax.tree.map(
    lambda x: jnp.zeros((count, *x.shape), x.dtype), shapes
  )
  # A position of zero would be a token, and not an empty slot.
  return shard_stack(stack.clear())


def _finalize(
  model: Model, plan: Plan, spec: LayerSpec, stack: Any, capacity: int
) -> Layer:
  """Cuts off the room for a block, and what the method no longer needs."""
  if not stack.compressible:
    return shard_stack(stack)
  stack = stack.shrink(capacity)
  if plan.schedule.every is not None:
    return shard_stack(stack)
  program = LayerProgram(
    capacity,
    paged=in_pages(plan, spec),
    renumbers=spec if plan.method.traits.renumbers else None,
    kv_dtype=plan.kv_dtype,
  )
  finalize = functools.partial(finalize_layer, model, program)
  layers: Layer = jax.vmap(finalize)(stack.without_memory())
  return shard_stack(layers)
