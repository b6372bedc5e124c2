"""Measures retrieval quality while a model decodes with its full cache."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

import kvjax
from kvjax.activations import Activations
from kvjax.cache.base import Layer
from kvjax.cache.cache import Cache
from kvjax.cache.sparse import SparseLayer
from kvjax.engine.forward import hidden_states
from kvjax.errors import InputError
from kvjax.model import Model
from kvjax.retrieval import Flat


class Quality(NamedTuple):
  """Means over rows, heads and decoded tokens, in one layer.

  Attributes:
    recall: share of the keys of exact search that are retrieved.
    error: |o - o_dense| / |o_dense| of a head's output.
    read: tokens attended to.
  """

  recall: Float[Array, ""] | float
  error: Float[Array, ""] | float
  read: Float[Array, ""] | float


class _State(NamedTuple):
  """A layer's full cache, its caches with indexes, and sums so far."""

  full: Layer | None
  sparse: tuple[Layer | None, ...]
  sums: tuple[Quality, ...]
  queries: Float[Array, "B N D"]
  cosine: Float[Array, ""]


def measure(
  model: Model,
  params: PyTree,
  prompts: kvjax.Prompts,
  plans: Sequence[kvjax.Plan],
  steps: int,
) -> tuple[list[list[Quality | None]], list[float]]:
  """Decodes greedily with the full cache and compares retrieval with it.

  Args:
    model: the model.
    params: its weights.
    prompts: the prompts.
    plans: retrieval plans.
    steps: tokens to decode.

  Returns:
    The quality for every plan and layer, None for layers without an index; and
    the mean cosine of neighboring queries for every layer.
  """
  full = kvjax.get_plan("full", kvjax.Retention(1.0))
  caches, logits = kvjax.sweep(model, params, prompts, [full, *plans])
  sums, cosines = _decode(model, params, caches, logits, steps=steps)
  qualities = [
    [
      Quality(*map(float, sums[number][p]))
      if isinstance(layer, SparseLayer)
      else None
      for number, layer in enumerate(cache.layers)
    ]
    for p, cache in enumerate(caches[1:])
  ]
  return qualities, [float(x) for x in cosines]


@functools.partial(jax.jit, static_argnames=("model", "steps"))
def _decode(
  model: Model,
  params: PyTree,
  caches: tuple[Cache, ...],
  logits: Float[Array, "B V"],
  *,
  steps: int,
) -> tuple[list[tuple[Quality, ...]], list[Float[Array, ""]]]:
  full, *sparse = [
    cache.grow([s.capacity and s.capacity + steps for s in cache.stacks])
    for cache in caches
  ]
  zero = jnp.zeros(())
  states = tuple(
    _State(
      full.layer(layer),
      tuple(other.layer(layer) for other in sparse),
      (Quality(zero, zero, zero),) * len(sparse),
      jnp.zeros((logits.shape[0], spec.heads, spec.key_dim)),
      zero,
    )
    for layer, spec in enumerate(model.geometry.layers)
  )

  def step(carry: tuple, _: None) -> tuple[tuple, None]:
    states, token, positions = carry
    hidden, states = hidden_states(
      model, params, token[:, None], positions[:, None], states, _attend
    )
    token = jnp.argmax(model.logits(params, hidden[:, 0]), axis=-1)
    return (states, token.astype(jnp.int32), positions + 1), None

  first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  start = (states, first, full.next_positions)
  (states, _, _), _ = jax.lax.scan(step, start, None, length=steps)
  sums = [jax.tree.map(lambda x: x / steps, state.sums) for state in states]
  # The query of the first token has no neighbor.
  return sums, [state.cosine / max(steps - 1, 1) for state in states]


def _attend(
  layer: int, state: _State, activations: Activations
) -> tuple[Float[Array, "B N S D"], _State]:
  """Computes dense attention, and the other caches' quality for its query."""
  del layer
  assert state.full is not None
  full = state.full.append(activations)
  dense, _ = full.attend(activations)
  sparse, sums = [], []
  for other, so_far in zip(state.sparse, state.sums, strict=True):
    if isinstance(other, SparseLayer):
      other = other.append(activations)
      output, after = other.attend(activations)
      quality = _quality(other, activations, output, dense)
      so_far = Quality(*(a + b for a, b in zip(so_far, quality, strict=True)))
      other = after
    sparse.append(other)
    sums.append(so_far)
  queries = activations.queries[:, :, 0].astype(jnp.float32)
  near = jnp.mean(_cosine(queries, state.queries))
  return dense, _State(
    full, tuple(sparse), tuple(sums), queries, state.cosine + near
  )


def _quality(
  layer: SparseLayer,
  activations: Activations,
  output: Float[Array, "B N S D"],
  dense: Float[Array, "B N S D"],
) -> Quality:
  """Compares a layer's output and retrieved keys with the exact ones."""
  off = jnp.linalg.norm((output - dense).astype(jnp.float32), axis=-1)
  size = jnp.linalg.norm(dense.astype(jnp.float32), axis=-1)
  retrieved = _retrieved(layer, activations)
  exact = _retrieved(
    dataclasses.replace(layer, retrieval=Flat(), index=None), activations
  )
  wanted = jnp.sum(exact.astype(jnp.float32), axis=-1)
  hits = jnp.sum((retrieved & exact).astype(jnp.float32), axis=-1)
  read = jnp.sum(retrieved.astype(jnp.float32), axis=-1)
  return Quality(
    jnp.mean(hits / jnp.maximum(wanted, 1.0)),
    jnp.mean(off / jnp.maximum(size, 1e-6)),
    jnp.mean(read + layer.resident.lengths.astype(jnp.float32)),
  )


def _retrieved(
  layer: SparseLayer, activations: Activations
) -> Bool[Array, "B K F"]:
  """Computes the mask of stored slots that any head of a group retrieves."""
  _, result = layer.retrieve(
    layer.index, activations.queries[:, :, 0], activations.positions[:, 0]
  )
  slots = result.visible_slots
  batch, kv_heads = slots.shape[:2]
  capacity = layer.stored.capacity

  def mark(slots: Int[Array, " M"]) -> Bool[Array, " F"]:
    place = jnp.where(slots >= 0, slots, capacity)
    return jnp.zeros(capacity + 1, bool).at[place].set(True)[:capacity]

  return jax.vmap(jax.vmap(mark))(slots.reshape(batch, kv_heads, -1))


def _cosine(
  one: Float[Array, "*B D"], other: Float[Array, "*B D"]
) -> Float[Array, "*B"]:
  norms = jnp.linalg.norm(one, axis=-1) * jnp.linalg.norm(other, axis=-1)
  return jnp.sum(one * other, axis=-1) / jnp.maximum(norms, 1e-6)


def mean(per_layer: Sequence[Quality | None]) -> Quality:
  """Averages over the layers that have an index.

  Raises:
    InputError: no layer has one.
  """
  qualities = [quality for quality in per_layer if quality is not None]
  if not qualities:
    raise InputError(
      "A method has an index in none of the layers: all of them are dense, or "
      "it may retrieve all there is; give it less to retrieve."
    )
  return Quality(
    *(float(np.mean(values)) for values in zip(*qualities, strict=True))
  )
