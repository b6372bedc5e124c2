"""Prompts that are worked through block by block in a fixed memory."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.cache import Cache
from kvjax.cache.layers import Layer, LayerCache
from kvjax.cache.sharding import shard_cache
from kvjax.engine.plans import Plan
from kvjax.engine.step import (
  Limits,
  attend_to,
  block_positions,
  evict,
  finished,
)
from kvjax.model import Model
from kvjax.prompts import Prompts

_States = Sequence[Layer | None]
# What is held, and the hidden state of each row's last token so far.
_Carry = tuple[Cache, Float[Array, "B E"]]


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
  )
  return _prefill_blocks(
    model,
    params,
    jnp.asarray(prompts.tokens),
    jnp.asarray(lengths, jnp.int32),
    limits,
    None if prompts.protected is None else jnp.asarray(prompts.protected),
  )


@functools.partial(jax.jit, static_argnames=("model",))
def _prefill_blocks(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  limits: Limits,
  protected: Bool[Array, "B S"] | None,
) -> tuple[Cache, Float[Array, "B V"]]:
  schedule = limits.plan.schedule
  assert schedule.block is not None
  block = min(schedule.block, tokens.shape[1])
  first = min(schedule.first or block, tokens.shape[1])
  tokens = jnp.pad(tokens, ((0, 0), (0, -(tokens.shape[1] - first) % block)))

  def attend(
    layer: int, state: LayerCache | None, seen: Activations
  ) -> tuple[Float[Array, "B N S D"], LayerCache]:
    seen = limits.plan.candidates(seen)
    cache = LayerCache.of(seen) if state is None else state.append(seen)
    output, _ = attend_to(model, limits.plan.method, cache, seen)
    room = limits.capacities[layer] + block
    cache = cache.grown(max(room - cache.capacity, 0))
    cache = evict(limits, layer, cache, seen, protected)
    return output, shard_cache(cache.shrunk(room))

  def run(
    states: _States, places: Int[Array, " B"], start: Int[Array, ""], width: int
  ) -> _Carry:
    """A block; the hidden state of each row's last token if it is in there."""
    own = jax.lax.dynamic_slice_in_dim(tokens, start, width, axis=1)
    real = jnp.clip(lengths - start, 0, width)
    positions = block_positions(places, width, real)
    hidden, layers = model.hidden(params, own, positions, states, attend)
    cache = Cache(layers, places + real)
    last = jnp.maximum(real - 1, 0)[:, None, None]
    return cache, jnp.take_along_axis(hidden, last, axis=1)[:, 0]

  def next_block(index: Int[Array, ""], carry: _Carry) -> _Carry:
    cache, last = carry
    start = first + index * block
    cache, found = run(cache.layers, cache.next_positions, start, block)
    return cache, jnp.where((lengths > start)[:, None], found, last)

  zero = jnp.zeros((), jnp.int32)
  nothing: _States = (None,) * model.geometry.layers
  carry = run(nothing, jnp.zeros_like(lengths), zero, first)
  blocks = -((first - jnp.max(lengths)) // block)
  cache, last = jax.lax.fori_loop(0, jnp.maximum(blocks, 0), next_block, carry)
  layers = tuple(
    _settled(limits, layer, state) for layer, state in enumerate(cache.layers)
  )
  cache = finished(model, limits.plan, layers, lengths, protected)
  return cache, model.logits(params, last)


def _settled(limits: Limits, layer: int, cache: Layer) -> LayerCache:
  """Without the room for a block, and without memory if it has no more use."""
  assert isinstance(cache, LayerCache)
  cache = cache.shrunk(limits.capacities[layer])
  return cache if limits.plan.schedule.every else cache.forgetful()
