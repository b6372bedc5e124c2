"""What a method finds in one layer's prompt, and what it keeps, compiled."""

import functools

import jax
import jax.numpy as jnp

from kvjax.cache.layers import LayerCache
from kvjax.methods import LayerBudget


@functools.partial(jax.jit, static_argnums=0)
def evaluate(method, activations, layer=0, cache=None):
  """Evaluates a prompt, or a later cache of it."""
  cache = LayerCache.of(activations) if cache is None else cache
  with jax.default_matmul_precision("highest"):
    return method.evaluate(jnp.int32(layer), cache, activations)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def select(recipe, activations, count, capacity):
  """Slots that a recipe keeps if every head has `count` of them on average."""
  method = recipe.method
  allocation = recipe.allocation or method.allocation
  batch, kv_heads = activations.keys.shape[:2]
  cache = LayerCache.of(activations)
  with jax.default_matmul_precision("highest"):
    found = allocation.evaluate(method, jnp.int32(0), cache, activations)
  counts = jnp.full(batch, count)
  budget = LayerBudget(counts, capacity, total=counts * kv_heads)
  return allocation.select(method, found, cache, budget)
