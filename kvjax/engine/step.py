"""One step for everything: attend to cache and block, append, compress."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.cache import Cache
from kvjax.cache.layers import Layer, LayerCache
from kvjax.cache.packed import PackedLayer
from kvjax.cache.quantized import stored
from kvjax.cache.sharding import shard_cache
from kvjax.engine.plans import Plan
from kvjax.engine.rerotation import closed_up, rerotated
from kvjax.methods.base import Allowance, Method
from kvjax.model import Model
from kvjax.struct import static, struct


def attend_to(
  model: Model, method: Method | None, cache: Layer, seen: Activations
) -> tuple[Float[Array, "B N S D"], Layer]:
  """A block's attention to a layer's cache, the block in it; the cache then.

  Args:
    model: turns keys where the method rerotates.
    method: what the cache is evicted by; None where it no longer is.
    cache: the layer.
    seen: the block.
  """
  if method is not None and method.rerotates:
    assert isinstance(cache, LayerCache)
    closed = closed_up(model, cache)
    return closed.attend(seen.queries, seen.positions)[0], cache
  return cache.attend(seen.queries, seen.positions)


def compress(
  method: Method,
  layer: int,
  cache: LayerCache,
  seen: Activations,
  allowances: Sequence[Allowance],
  judged: Callable[[], PyTree[Array]] | None = None,
) -> tuple[Layer, ...]:
  """Keeps what a method finds best, once for every allowance.

  Args:
    method: what to keep.
    layer: index of the layer.
    cache: the candidates; the block's tokens are among them.
    seen: the block whose attention has just been computed.
    allowances: how much to keep.
    judged: tells what the method found, if that is not to be asked here.

  Returns:
    One cache for each allowance; the candidates themselves where nothing needs
    to go.
  """
  if method.keeps_all(layer) or all(a.whole for a in allowances):
    return tuple(cache for _ in allowances)
  found = judged() if judged else judge(method, layer, cache, seen)

  return tuple(
    cache if allowance.whole else shortened(method, cache, found, allowance)
    for allowance in allowances
  )


def shortened(
  method: Method,
  cache: LayerCache,
  found: PyTree[Array],
  allowance: Allowance,
) -> Layer:
  """A layer with what a method chooses by what it has found there."""
  slots = method.select(found, cache, allowance)
  if method.packed:
    heads = cache.positions.shape[1]
    return PackedLayer.of(cache, slots, heads * allowance.capacity)
  return cache.take(slots)


def judge(
  method: Method, layer: int, cache: LayerCache, seen: Activations
) -> PyTree[Array]:
  """What a method's choice depends on; in float32 on every backend."""
  with jax.default_matmul_precision("highest"):
    return method.evaluate(layer, cache, seen)


def observe(
  method: Method, layer: int, cache: LayerCache, seen: Activations
) -> LayerCache:
  """Remembers of a block what the method needs at later evictions."""
  with jax.default_matmul_precision("highest"):
    return method.observe(layer, cache, seen)


@struct
class Limits:
  """What every layer may hold from one eviction to the next.

  Attributes:
    counts: tokens per layer and row.
    plan: the method, its budget and schedule.
    capacities: per layer, the most that any row may hold.
  """

  counts: Int[Array, "L B"]
  plan: Plan = static()
  capacities: tuple[int, ...] = static()


def evict(
  limits: Limits,
  layer: int,
  cache: LayerCache,
  seen: Activations,
  protected: Bool[Array, "B P"] | None,
  asked: Bool[Array, ""] | bool = True,
) -> LayerCache:
  """Compresses a layer within its room, where it holds more than it may.

  Args:
    limits: what it may hold.
    layer: index of the layer.
    cache: the candidates, the block's tokens among them.
    seen: the block whose attention has just been computed.
    protected: by position, tokens that must be kept, if there are any.
    asked: false lets the layer hold more for now.

  Returns:
    A cache of the same capacity, whose tokens come first if some had to go.
  """
  method = limits.plan.method
  seen = limits.plan.candidates(seen)
  cache = observe(method, layer, cache, seen)
  if method.keeps_all(layer):
    return cache
  capacity = min(limits.capacities[layer], cache.capacity)
  allowance = Allowance(
    limits.counts[layer],
    capacity,
    budget=limits.plan.fixed_budget,
    protected=protected,
  )

  def keep(cache: LayerCache) -> LayerCache:
    (kept,) = compress(method, layer, cache, seen, [allowance])
    assert isinstance(kept, LayerCache)
    return kept.grown(cache.capacity - kept.capacity)

  # Holes, of rows that had less to append, take room too.
  due = method.due(cache, allowance) | (cache.cursor > capacity)
  return jax.lax.cond(due & asked, keep, lambda same: same, cache)


def evict_all(limits: Limits, cache: Cache, heads: int) -> Cache:
  """Compresses every layer that holds more than it may, after the last block.

  Args:
    limits: what the layers may hold.
    cache: the candidates.
    heads: N.
  """

  def nothing(layer: LayerCache) -> Activations:
    batch, kv_heads, _, dim = layer.keys.shape
    keys = jnp.zeros((batch, kv_heads, 1, dim), layer.keys.dtype)
    return Activations(
      queries=jnp.zeros((batch, heads, 1, dim), layer.keys.dtype),
      keys=keys,
      values=keys,
      keys_unrotated=keys,
      positions=jnp.full((batch, 1), -1, jnp.int32),
    )

  layers = []
  for index, layer in enumerate(cache.layers):
    assert isinstance(layer, LayerCache)
    seen = nothing(layer)
    layers.append(evict(limits, index, layer, seen, cache.protected))
  return dataclasses.replace(cache, layers=tuple(layers))


def settled(
  model: Model, method: Method, storage: str | None, layer: Layer
) -> Layer:
  """A layer as it lasts, its method having chosen for the last time.

  Args:
    model: turns keys where the method renumbers them.
    method: what has chosen.
    storage: what keys and values are rounded to, if they are.
    layer: what is left, as it was computed.
  """
  if method.rerotates:
    assert isinstance(layer, LayerCache)
    layer = rerotated(model, layer)
  if storage is not None:
    layer = shard_cache(stored(layer, storage))
  return layer


def finished(
  model: Model,
  plan: Plan,
  layers: tuple[Layer, ...],
  lengths: Int[Array, " B"],
  protected: Bool[Array, "B P"] | None,
) -> Cache:
  """The cache of a prefill, which goes on evicting only if its plan does."""
  if plan.schedule.every:
    return Cache(layers, lengths, protected, plan)
  layers = tuple(
    settled(model, plan.method, plan.storage, layer) for layer in layers
  )
  return lasting(plan.method, layers, lengths)


def lasting(
  method: Method, layers: tuple[Layer, ...], lengths: Int[Array, " B"]
) -> Cache:
  """The cache of layers that are `settled`, of rows of these lengths.

  Where the method has renumbered tokens the next one follows the last that is
  kept; all heads of all layers keep as many then.
  """
  return Cache(layers, layers[0].lengths[:, 0] if method.rerotates else lengths)


def block_positions(
  start: Int[Array, " B"], length: int, lengths: Int[Array, " B"]
) -> Int[Array, "B S"]:
  """Positions of a right-padded block, -1 where it is padding."""
  index = jnp.arange(length, dtype=jnp.int32)
  real = index[None] < lengths[:, None]
  return jnp.where(real, start[:, None] + index[None], -1)
