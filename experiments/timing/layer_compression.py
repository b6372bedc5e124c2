"""A layer of a prompt: its attention, and how its cache is compressed."""

import dataclasses
from collections.abc import Callable
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
  load,
)
from kvjax.engine.preparing import prepare
from kvjax.errors import InputError
from kvjax.experiments.run import stopwatch
from kvjax.kernels.prompt_attention.api import prompt_attention
from kvjax.model import Geometry
from kvjax.testing import TinyModel


def check(name: str, plan: kvjax.Plan) -> None:
  """Rejects plans that one layer, drawn at random, cannot compress.

  Raises:
    InputError: it keeps all keys, waits for other layers, or reads what only a
      model has.
  """
  traits = plan.method.traits
  if plan.sparse is not None or traits.keeps_all:
    raise InputError(f"{name} keeps all keys, so there is nothing to time.")
  joins = plan.spread.whole_model or traits.joins_layers
  if traits.replay is not None or joins:
    raise InputError(
      f"{name} needs more than one layer, and this times one alone."
    )
  drawn = draw(Geometry.uniform(1, 1, 1, 2, 1), 1)
  lacking = [n for n in traits.activations if getattr(drawn, n) is None]
  if lacking:
    raise InputError(
      f"{name} reads {', '.join(sorted(lacking))}, which only a model has; "
      "this times a layer alone."
    )


def draw(
  geometry: Geometry,
  length: int,
  dtype: str = "float32",
  queries: int | None = None,
) -> Activations:
  """Draws Gaussian activations of one row in the first layer.

  Args:
    geometry: of a model.
    length: tokens of the row.
    dtype: dtype of the activations.
    queries: number of last queries; None for all.
  """
  spec = geometry.layers[0]
  # This generator takes less memory than the default one on CPUs.
  draws = iter(jax.random.split(jax.random.key(0, impl="rbg"), 4))

  def normal(heads: int, tokens: int = length) -> jax.Array:
    shape = (1, heads, tokens, spec.key_dim)
    return jax.random.normal(next(draws), shape, dtype)

  asked = length if queries is None else min(queries, length)
  return Activations(
    queries=normal(spec.heads, asked),
    keys=normal(spec.kv_heads),
    values=normal(spec.kv_heads),
    positions=jnp.arange(length, dtype=jnp.int32)[None],
    keys_unrotated=normal(spec.kv_heads),
  )


def draw_for(
  plan: kvjax.Plan, geometry: Geometry, length: int, dtype: str = "float32"
) -> Activations:
  """Draws what a prefill hands on to a plan's method; see `draw`."""
  evaluation = Evaluation.of(plan)

  # Compiled, it draws nothing else.
  @jax.jit
  def handed_on() -> Activations:
    drawn = draw(geometry, length, dtype, evaluation.queries)
    return drawn.only(evaluation.activations)

  return handed_on()


@dataclasses.dataclass(frozen=True)
class Compression:
  """Scoring and compaction of the layer, whose attention has been computed.

  Attributes:
    plan: a plan for whole prompts that does not wait for other layers.
  """

  plan: kvjax.Plan

  def seconds(self, geometry: Geometry, activations: Activations) -> float:
    """Scores and compacts the layer once; a first call compiles.

    Args:
      geometry: of a model of one layer.
      activations: those of `draw` or `draw_for`.
    """
    plan, length = self.plan, activations.positions.shape[1]
    prompts = kvjax.Prompts.of([[0] * length], padded=length)

    def compress() -> kvjax.Cache:
      prepared = prepare(plan, prompts, geometry)
      requests = list_evaluations(0, [plan], [prepared], geometry)
      evaluations = evaluate_all(0, activations, requests, load(requests), {})
      builder = CacheBuilder(TinyModel(geometry), prepared, None)
      evaluated = find_evaluated(plan, evaluations)
      builder.keep(0, activations.only(()), evaluated)
      return builder.cache(jnp.asarray(prompts.lengths))

    jax.block_until_ready(activations)
    return stopwatch.seconds(compress)

  def temporary_bytes(
    self, geometry: Geometry, length: int, dtype: str = "float32"
  ) -> int:
    """Bytes that scoring alone allocates besides its arguments and results."""
    evaluation = Evaluation.of(self.plan)
    return _temporary_bytes(
      lambda activations: evaluate_layer(evaluation, jnp.int32(0), activations),
      lambda: draw(geometry, length, dtype).only(
        self.plan.method.traits.activations
      ),
    )


class Attention:
  """The layer's attention to its own prompt, which comes before its scores."""

  def seconds(self, geometry: Geometry, activations: Activations) -> float:
    """Attends from every token; see `Compression`."""
    jax.block_until_ready(activations)
    return stopwatch.seconds(lambda: _attend(activations))

  def temporary_bytes(
    self, geometry: Geometry, length: int, dtype: str = "float32"
  ) -> int:
    """See `Compression`."""
    return _temporary_bytes(_attend, lambda: draw(geometry, length, dtype))


# What can be timed at several lengths.
Operation = Compression | Attention


@jax.jit
def _attend(activations: Activations) -> jax.Array:
  return prompt_attention(
    activations.queries,
    activations.keys,
    activations.values,
    activations.positions,
  )


def _temporary_bytes(
  run: Callable[[Activations], Any], make: Callable[[], Activations]
) -> int:
  """Compiles an operation on what is made, of which nothing is run."""
  shapes = jax.eval_shape(make)
  memory = jax.jit(run).lower(shapes).compile().memory_analysis()
  assert memory is not None
  return int(memory.temp_size_in_bytes)
