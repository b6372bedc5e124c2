"""Budgets that the heads of all layers share by their scores."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.allocation.base import LayerBudget
from kvjax.allocation.whole_layer import count_best
from kvjax.cache.layers import LayerCache
from kvjax.cache.packed import PAGE, most_pages, page_devices
from kvjax.engine.prepared import PreparedPlan
from kvjax.hosts import is_traced, read
from kvjax.methods.base import ScoringMethod
from kvjax.model import Geometry, LayerSpec
from kvjax.prompts import bucket

# Tokens that each head of a layer keeps, by the layer's number.
HeadCounts = Mapping[int, Int[Array, "B K"]]


def count_by_head(
  prepared: PreparedPlan,
  activations: Mapping[int, Activations],
  scores: Mapping[int, Float[Array, "B K T"]],
  protected: Bool[Array, "B P"] | None,
  geometry: Geometry,
) -> tuple[PreparedPlan, HeadCounts]:
  """Shares a budget out over the heads of all layers.

  Args:
    prepared: a plan whose allocation is for the whole model.
    activations: those of the prompt, for each layer that the plan compresses.
    scores: the method's scores in each of these layers.
    protected: by position, tokens that must be kept, if there are any.
    geometry: sizes of the model.

  Returns:
    The plan, with room for the tokens of each layer, and the tokens of each
    head.
  """
  method = prepared.plan.method
  assert isinstance(method, ScoringMethod)
  padded = next(iter(activations.values())).positions.shape[1]
  budgets = prepared.budgets(padded, protected)
  counts = dict(
    zip(
      scores,
      _count(
        [activations[layer] for layer in scores],
        list(scores.values()),
        [budgets[layer] for layer in scores],
        method=method,
      ),
      strict=True,
    )
  )
  on_host: dict[int, Int[np.ndarray, "B K"]]
  if is_traced(counts) and len(_kinds(counts, geometry)) == 1:
    # The pool depends on the budget alone, and a layer of it may keep all.
    most = [np.full(of.shape, padded, np.int32) for of in counts.values()]
    on_host = dict(zip(counts, most, strict=True))
  else:
    # One transfer, as the sizes of the caches depend on it.
    on_host = read(counts)
  return fit_to_counts(prepared, on_host, padded, geometry), counts


def fit_to_counts(
  prepared: PreparedPlan,
  counts: Mapping[int, Int[np.ndarray, "B K"]],
  padded: int,
  geometry: Geometry,
) -> PreparedPlan:
  """Gives the layers of a plan room for the tokens that their heads keep.

  Args:
    prepared: the plan; its capacity is at least the mean of all heads.
    counts: tokens that each head keeps, by the layer's number.
    padded: slots of the prompt.
    geometry: sizes of the model.
  """
  most = max(
    -(-int(of.sum(axis=1).max()) // of.shape[1]) for of in counts.values()
  )
  # The most that a layer may have, rounded up to a bucket: otherwise every
  # prompt would need programs of its own.
  room = min(bucket(most), padded)
  capacities = tuple(
    room if layer in counts else capacity
    for layer, capacity in enumerate(prepared.capacities)
  )
  pool = _pages_per_layer(prepared.capacity, counts, geometry)
  return dataclasses.replace(prepared, capacities=capacities, pool=pool)


def _pages_per_layer(
  capacity: int,
  counts: Mapping[int, Int[np.ndarray, "B K"]],
  geometry: Geometry,
) -> int:
  """Pages per layer, with which the pool of each kind of layer suffices.

  Args:
    capacity: mean of the tokens that the heads of any row keep.
    counts: tokens that each head keeps, by the layer's number.
    geometry: sizes of the model.
  """
  kinds = _kinds(counts, geometry)
  if len(kinds) == 1:
    # By the budget alone: other prompts then share the programs.
    heads = sum(of.shape[1] for of in counts.values())
    return _per_layer(most_pages(heads * capacity, heads, PAGE), len(counts))
  # Layers of one kind may have more than their share.
  needed = []
  for alike in kinds.values():
    pages = [np.sum(-(-counts[layer] // PAGE), axis=1) for layer in alike]
    needed.append((int(np.sum(pages, axis=0).max()), len(alike)))
  return max(_per_layer(bucket(pages), layers) for pages, layers in needed)


def _kinds(
  layers: Iterable[int], geometry: Geometry
) -> dict[LayerSpec, list[int]]:
  """Lists the layers of each kind, which have a pool of their own."""
  kinds: dict[LayerSpec, list[int]] = {}
  for layer in layers:
    kinds.setdefault(geometry.layers[layer], []).append(layer)
  return kinds


def _per_layer(pages: int, layers: int) -> int:
  """Pages per layer, so that each device has room for its share of them all.

  Of u pages of a layer, a device has at most (u + n - 1) / n.
  """
  devices = page_devices()
  per_layer = -(-pages // layers) + devices - 1
  return -(-per_layer // devices) * devices


@functools.partial(jax.jit, static_argnames=("method",))
def _count(
  activations: list[Activations],
  scores: list[Float[Array, "B _ T"]],
  budgets: list[LayerBudget],
  *,
  method: ScoringMethod,
) -> list[Int[Array, "B _"]]:
  """Counts the tokens that each head of each layer keeps."""
  caches = [
    LayerCache.of(seen.with_kv_heads(of_layer.shape[1]))
    for seen, of_layer in zip(activations, scores, strict=True)
  ]
  protected = [
    method.protected(cache, budget.per_head) | budget.must_keep(cache)
    for cache, budget in zip(caches, budgets, strict=True)
  ]
  totals = [budget.total for budget in budgets if budget.total is not None]
  counts = count_best(
    jnp.concatenate(scores, axis=1),
    jnp.concatenate([cache.valid for cache in caches], axis=1),
    jnp.concatenate(protected, axis=1),
    functools.reduce(jnp.add, totals),
  )
  ends = np.cumsum([of_layer.shape[1] for of_layer in scores])
  return jnp.split(counts, ends[:-1], axis=1)
