"""Measures retrieval quality while a model decodes with its full cache."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

import kvjax
from kvjax import hosts
from kvjax.activations import Activations
from kvjax.cache.base import Layer
from kvjax.cache.cache import Cache
from kvjax.cache.retrieve import retrieved_slots
from kvjax.cache.sparse import SparseLayer
from kvjax.engine.forward import hidden_states
from kvjax.errors import InputError
from kvjax.model import Model
from kvjax.retrieval import Flat


class Quality(NamedTuple):
  """Means over heads and decoded tokens for each row, in one layer.

  Attributes:
    recall: share of the keys of exact search that are retrieved.
    error: |o - o_dense| / |o_dense| of a head's output.
    read: tokens attended to.
  """

  recall: Float[Array | np.ndarray, " B"]
  error: Float[Array | np.ndarray, " B"]
  read: Float[Array | np.ndarray, " B"]


class _Token(NamedTuple):
  """What a layer with a full cache computes for a decoded token.

  Attributes:
    activations: of the token.
    output: the attention output of each head.
  """

  activations: Activations
  output: Float[Array, "B N S D"]


def measure(
  model: Model,
  params: PyTree,
  prompts: kvjax.Prompts,
  plans: Sequence[kvjax.Plan],
  steps: int,
) -> tuple[list[list[Quality | None]], list[float]]:
  """Decodes greedily with the full cache and compares retrieval with it.

  Returns:
    The quality for every plan and layer, None for layers without an index; and
    the mean cosine of neighboring queries for every layer.
  """
  full = kvjax.get_plan("full", kvjax.Retention(1.0))
  (cache, *indexed), logits = kvjax.sweep(
    model, params, prompts, [full, *plans]
  )
  decoded = _decode(model, params, cache, logits, steps=steps)
  qualities = [
    [_quality_of(other.layer(n), tokens) for n, tokens in enumerate(decoded)]
    for other in indexed
  ]
  cosines = [
    float(_neighbors(tokens.activations.queries[:, :, :, 0]))
    for tokens in decoded
  ]
  return qualities, cosines


@functools.partial(jax.jit, static_argnames=("model", "steps"))
def _decode(
  model: Model,
  params: PyTree,
  cache: Cache,
  logits: Float[Array, "B V"],
  *,
  steps: int,
) -> tuple[_Token, ...]:
  """Decodes greedily; returns for every layer its tokens, stacked."""
  cache = cache.grow([s.capacity and s.capacity + steps for s in cache.stacks])

  def attend(
    layer: int, state: Layer, activations: Activations
  ) -> tuple[Float[Array, "B N S D"], tuple[Layer, _Token]]:
    del layer
    state = state.append(activations)
    output, state = state.attend(activations)
    return output, (state, _Token(activations.only(()), output))

  def step(carry: tuple, _: None) -> tuple[tuple, tuple[_Token, ...]]:
    layers, token, positions = carry
    hidden, states = hidden_states(
      model, params, token[:, None], positions[:, None], layers, attend
    )
    layers, tokens = zip(*states, strict=True)
    token = jnp.argmax(model.logits(params, hidden[:, 0]), axis=-1)
    return (layers, token.astype(jnp.int32), positions + 1), tokens

  first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  start = (cache.layers, first, cache.next_positions)
  return jax.lax.scan(step, start, None, length=steps)[1]


def _quality_of(layer: Layer | None, tokens: _Token) -> Quality | None:
  if not isinstance(layer, SparseLayer):
    return None
  return hosts.read(_retrieve(layer, tokens))


@jax.jit
def _retrieve(layer: SparseLayer, tokens: _Token) -> Quality:
  """Averages the quality of a layer over decoded tokens.

  Compiled once for all layers of a plan, as they differ in their numbers alone.
  """
  steps = tokens.output.shape[0]
  layer = layer.grow(steps)

  def step(layer: SparseLayer, token: _Token) -> tuple[SparseLayer, Quality]:
    layer = layer.append(token.activations)
    output, after = layer.attend(token.activations)
    return after, _quality(layer, token.activations, output, token.output)

  qualities = jax.lax.scan(step, layer, tokens)[1]
  return Quality(*(jnp.mean(each, axis=0) for each in qualities))


@jax.jit
def _neighbors(queries: Float[Array, "S B N D"]) -> Float[Array, ""]:
  """Mean cosine of the queries of neighboring tokens, 0 for a lone token."""
  queries = queries.astype(jnp.float32)
  if len(queries) == 1:
    return jnp.zeros(())
  return jnp.mean(_cosine(queries[1:], queries[:-1]))


def _quality(
  layer: SparseLayer,
  activations: Activations,
  output: Float[Array, "B N S D"],
  dense: Float[Array, "B N S D"],
) -> Quality:
  """Compares a layer's output and retrieved keys with the exact ones."""
  off = jnp.linalg.norm((output - dense).astype(jnp.float32), axis=-1)
  size = jnp.linalg.norm(dense.astype(jnp.float32), axis=-1)
  found = retrieved(layer, activations)
  exact = retrieved(
    dataclasses.replace(layer, retrieval=Flat(), index=None), activations
  )
  wanted = jnp.sum(exact.astype(jnp.float32), axis=-1)
  hits = jnp.sum((found & exact).astype(jnp.float32), axis=-1)
  read = jnp.sum(found.astype(jnp.float32), axis=-1)
  return Quality(
    jnp.mean(hits / jnp.maximum(wanted, 1.0), axis=-1),
    jnp.mean(off / jnp.maximum(size, 1e-6), axis=(-2, -1)),
    jnp.mean(read + layer.resident.lengths.astype(jnp.float32), axis=-1),
  )


def retrieved(layer: SparseLayer, token: Activations) -> Bool[Array, "B K F"]:
  """Computes the mask of stored slots that any head of a group retrieves."""
  queries, positions = token.queries[:, :, 0], token.positions[:, 0]
  options = token.attention
  _, selection = layer.retrieve(layer.index, queries, positions, options)
  return retrieved_slots(selection, layer.stored.capacity)


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
    *(
      np.mean(values, axis=0, dtype=np.float64)
      for values in zip(*qualities, strict=True)
    )
  )
