"""Scoring and compaction of one layer whose attention has been computed."""

import time
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
from kvjax.activations import Activations
from kvjax.engine.building import CacheBuilder
from kvjax.engine.compress import Evaluation, evaluate_layer
from kvjax.engine.evaluate import (
  evaluate_all,
  find_evaluated,
  list_evaluations,
)
from kvjax.engine.prepared import prepare
from kvjax.model import Geometry
from kvjax.testing import TinyModel


def draw(geometry: Geometry, length: int) -> Activations:
  """Draws Gaussian activations of one row in the first layer."""
  spec = geometry.layers[0]
  draws = iter(jax.random.split(jax.random.key(0), 4))

  def normal(heads: int) -> jax.Array:
    return jax.random.normal(next(draws), (1, heads, length, spec.key_dim))

  return Activations(
    queries=normal(spec.heads),
    keys=normal(spec.kv_heads),
    values=normal(spec.kv_heads),
    positions=jnp.arange(length, dtype=jnp.int32)[None],
    keys_unrotated=normal(spec.kv_heads),
  )


def seconds(
  plan: kvjax.Plan, geometry: Geometry, activations: Activations
) -> float:
  """Scores and compacts the layer; a first call compiles.

  Args:
    plan: a plan for whole prompts that does not wait for other layers.
    geometry: of a model of one layer.
    activations: those of `draw`.
  """
  length = activations.positions.shape[1]
  prompts = kvjax.Prompts.of([[0] * length], padded=length)
  jax.block_until_ready(activations)
  begin = time.perf_counter()
  prepared = prepare(plan, prompts, geometry)
  requests = list_evaluations(0, [plan], [prepared], geometry)
  evaluations = evaluate_all(0, activations, requests, {})
  builder = CacheBuilder(TinyModel(geometry), prepared, None)
  builder.keep(0, activations, find_evaluated(plan, evaluations))
  lengths = jnp.asarray(prompts.lengths)
  jax.block_until_ready(builder.cache(lengths))
  return time.perf_counter() - begin


def temporary_bytes(plan: kvjax.Plan, geometry: Geometry, length: int) -> int:
  """Bytes that the program that scores the layer allocates besides arrays.

  These are all but its arguments and results; nothing is run.
  """
  names = plan.method.traits.activations
  structures = []

  def flat() -> list[jax.Array]:
    leaves, structure = jax.tree.flatten(draw(geometry, length).only(names))
    structures.append(structure)
    return leaves

  def evaluate(leaves: list[jax.Array]) -> Any:
    activations = jax.tree.unflatten(structures[0], leaves)
    return evaluate_layer(Evaluation.of(plan), jnp.int32(0), activations)

  shapes = jax.eval_shape(flat)
  memory = jax.jit(evaluate).lower(shapes).compile().memory_analysis()
  assert memory is not None
  return int(memory.temp_size_in_bytes)
