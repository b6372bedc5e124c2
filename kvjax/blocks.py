"""Prompts that are worked through block by block in a fixed memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache import Cache, LayerCache
from kvjax.model import Model
from kvjax.plans import Plan
from kvjax.prompts import Prompts
from kvjax.sharding import shard_cache
from kvjax.step import Limits, block_positions, evict

_States = tuple[LayerCache | None, ...]


def prefill_blocks(
  model: Model, params: PyTree, prompts: Prompts, plan: Plan
) -> tuple[Cache, Float[Array, "B V"]]:
  """Prefills with `plan.schedule.block`; see `kvjax.prefill`.

  A layer never holds more than its budget and a block.
  """
  lengths = np.asarray(prompts.lengths)
  padded = prompts.tokens.shape[1]
  layers = model.geometry.layers
  limits = Limits(
    jnp.asarray(plan.counts(lengths, layers)),
    plan,
    plan.lasting_capacities(padded, layers),
    None if prompts.protected is None else jnp.asarray(prompts.protected),
  )
  return _prefill_blocks(
    model,
    params,
    jnp.asarray(prompts.tokens),
    jnp.asarray(lengths, jnp.int32),
    limits,
  )


@functools.partial(jax.jit, static_argnames=("model",))
def _prefill_blocks(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  limits: Limits,
) -> tuple[Cache, Float[Array, "B V"]]:
  schedule = limits.plan.schedule
  assert schedule.block is not None
  block = schedule.block
  first = min(schedule.first or block, tokens.shape[1])
  tokens = jnp.pad(tokens, ((0, 0), (0, -(tokens.shape[1] - first) % block)))

  def attend(
    layer: int, state: LayerCache | None, seen: Activations
  ) -> tuple[Float[Array, "B N S D"], LayerCache]:
    cache = LayerCache.of(seen) if state is None else state.append(seen)
    output = cache.attend(seen.queries, seen.positions)
    room = limits.capacities[layer] + block
    cache = cache.grown(max(room - cache.capacity, 0))
    cache = evict(limits, layer, cache, seen)
    return output, shard_cache(cache.shrunk(room))

  def run(
    states: _States, start: Int[Array, ""], width: int
  ) -> tuple[tuple[LayerCache, ...], Float[Array, "B E"]]:
    """A block; the hidden state of each row's last token if it is in there."""
    own = jax.lax.dynamic_slice_in_dim(tokens, start, width, axis=1)
    places = block_positions(
      jnp.broadcast_to(start, lengths.shape), width, lengths - start
    )
    hidden, layers = model.hidden(params, own, places, states, attend)
    last = jnp.clip(lengths - 1 - start, 0, width - 1)
    return layers, jnp.take_along_axis(hidden, last[:, None, None], 1)[:, 0]

  def next_block(
    index: Int[Array, ""],
    carry: tuple[tuple[LayerCache, ...], Float[Array, "B E"]],
  ) -> tuple[tuple[LayerCache, ...], Float[Array, "B E"]]:
    states, last = carry
    start = first + index * block
    states, found = run(states, start, block)
    return states, jnp.where((lengths > start)[:, None], found, last)

  nothing: _States = (None,) * model.geometry.layers
  carry = run(nothing, jnp.zeros((), jnp.int32), first)
  blocks = -((first - jnp.max(lengths)) // block)
  states, last = jax.lax.fori_loop(0, jnp.maximum(blocks, 0), next_block, carry)
  states = tuple(
    _settled(limits, layer, state) for layer, state in enumerate(states)
  )
  protected = limits.protected if schedule.every else None
  return Cache(states, lengths, protected), model.logits(params, last)


def _settled(limits: Limits, layer: int, cache: LayerCache) -> LayerCache:
  """Without the room for a block, and without memory if it has no more use."""
  cache = cache.shrunk(limits.capacities[layer])
  return cache if limits.plan.schedule.every else cache.forgetful()
