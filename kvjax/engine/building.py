"""A plan's cache, filled layer by layer."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Bool, Int

from kvjax.activations import Activations
from kvjax.cache.base import Layer
from kvjax.cache.cache import Cache
from kvjax.cache.sharding import shard_stack
from kvjax.engine.compress import (
  Evaluated,
  Evaluation,
  Kept,
  compress_layer,
  finalize_cache,
  keep_alone,
  keep_layer,
  select_layer,
)
from kvjax.engine.prepared import LayerProgram, PreparedPlan
from kvjax.model import LayerSpec, Model
from kvjax.placement import is_on_host


class CacheBuilder:
  """Fills the cache of one plan.

  Layers with equal specs and programs share a stack, which is allocated with
  the first of them; the others are written in place.
  """

  def __init__(
    self,
    model: Model,
    prepared: PreparedPlan,
    protected: Bool[Array, "B P"] | None,
  ) -> None:
    """Begins with no layer.

    Args:
      model: turns keys where the method renumbers them.
      prepared: the plan.
      protected: by position, tokens that must be kept, if there are any.
    """
    self._model = model
    self._prepared = prepared
    self._protected = protected
    specs = model.geometry.layers
    # What stacks hold: layers that evict apart from those that never do.
    self._kinds = [
      (spec, prepared.program(layer, spec), prepared.evicts[layer])
      if spec.cache
      else None
      for layer, spec in enumerate(specs)
    ]
    self._stacks: list[Layer] = []
    self._order = [-1] * len(specs)
    # For each kind, its stack and how many layers that holds.
    self._filled: dict[
      tuple[LayerSpec, LayerProgram, bool], tuple[int, int]
    ] = {}

  def keep(
    self, layer: int, activations: Activations, evaluated: Evaluated | None
  ) -> None:
    """Compresses a layer and writes it into its stack.

    Args:
      layer: its number in the model.
      activations: of the prompt.
      evaluated: what the plan's method found and remembers, if anything.
    """
    kind = self._kinds[layer]
    assert kind is not None
    program = kind[1]
    num_keys = self._prepared.num_keys
    activations = activations.only(())
    kept = Kept(
      jnp.asarray(layer, jnp.int32),
      activations,
      evaluated and evaluated.remembered(),
      self._select(layer, activations, evaluated),
      None if program.retrieval is None else jnp.asarray(num_keys),
    )
    if kind in self._filled:
      stack, index = self._filled[kind]
    else:
      shape = _shape(self._model, program, kept)
      count = self._kinds.count(kind)
      if count == 1:
        self._order[layer] = len(self._stacks)
        self._stacks.append(
          keep_alone(kept, model=self._model, program=program)
        )
        return
      stack, index = len(self._stacks), 0
      self._stacks.append(_empty_stack(shape=shape, count=count))
    self._stacks[stack] = keep_layer(
      self._stacks[stack],
      np.int32(index),
      kept,
      model=self._model,
      program=program,
    )
    self._order[layer] = stack
    self._filled[kind] = stack, index + 1

  def _select(
    self, layer: int, activations: Activations, evaluated: Evaluated | None
  ) -> Int[Array, "B K T"] | None:
    """Slots to keep; None where nobody loses anything."""
    if self._prepared.whole[layer]:
      return None
    assert evaluated is not None
    slots = activations.positions.shape[1]
    return select_layer(
      Evaluation.of(self._prepared.plan),
      activations,
      evaluated,
      self._prepared.budget(layer, slots, self._protected),
    )

  def cache(self, lengths: Int[Array, " B"]) -> Cache:
    """The cache, when all layers have been kept."""
    return finalize_cache(
      self._prepared.plan,
      tuple(self._stacks),
      tuple(self._order),
      lengths,
      self._protected,
    )


@functools.partial(jax.jit, static_argnames=("shape", "count"))
def _empty_stack(*, shape: Any, count: int) -> Layer:
  """Zeros for so many layers, spread over the mesh in context.

  As one program: no device ever holds all heads, nor what the host is to hold.
  """

  def zeros(x: Any) -> Array:
    make = functools.partial(jnp.zeros, (count, *x.shape), x.dtype)
    if not is_on_host(x):
      return make()
    host = compute_on(
      make,
      compute_type="device_host",
      out_memory_spaces=jax.memory.Space.Host,
    )
    there: Array = host()
    return there

  stack: Layer = jax.tree.map(zeros, shape)
  return shard_stack(stack)


def _shape(model: Any, program: LayerProgram, kept: Kept) -> Any:
  """What a layer is compressed to, with shapes in place of arrays."""
  leaves, structure = jax.tree.flatten(kept)
  shapes = tuple((x.shape, jnp.dtype(x.dtype)) for x in leaves)
  return _compressed_shape(model, program, structure, shapes)


@functools.lru_cache(maxsize=4096)
def _compressed_shape(
  model: Any,
  program: LayerProgram,
  structure: Any,
  shapes: Sequence[tuple[Any, Any]],
) -> Any:
  leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
  kept = jax.tree.unflatten(structure, leaves)
  compress = functools.partial(compress_layer, model, program)
  return jax.eval_shape(lambda kept: compress(kept).offload(), kept)
