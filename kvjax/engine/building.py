"""A plan's cache, filled layer by layer."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.activations import Activations
from kvjax.cache.cache import Cache
from kvjax.cache.layers import Layer
from kvjax.cache.sharding import shard_stack
from kvjax.engine.compress import (
  Evaluated,
  Kept,
  compress_layer,
  finalize_cache,
  keep_alone,
  keep_layer,
)
from kvjax.engine.prepared import LayerProgram, PreparedPlan
from kvjax.model import LayerSpec, Model


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
    self._kinds = [
      (spec, prepared.program(layer, spec)) if spec.cache else None
      for layer, spec in enumerate(specs)
    ]
    self._stacks: list[Layer] = []
    self._order = [-1] * len(specs)
    # For each kind, its stack and how many layers that holds.
    self._filled: dict[tuple[LayerSpec, LayerProgram], tuple[int, int]] = {}

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
    kept = Kept(
      jnp.asarray(layer, jnp.int32),
      activations.only(()),
      evaluated,
      self._prepared.budget(layer, self._protected),
      None if program.retrieval is None else jnp.asarray(num_keys),
    )
    if kind in self._filled:
      stack, index = self._filled[kind]
    else:
      shape = _shape(self._model, program, kept)
      count = self._kinds.count(kind) if shape.stackable else 1
      if count == 1:
        self._order[layer] = len(self._stacks)
        self._stacks.append(
          keep_alone(kept, model=self._model, program=program)
        )
        return
      stack, index = len(self._stacks), 0
      self._stacks.append(_empty_stack(shape, count))
    self._stacks[stack] = keep_layer(
      self._stacks[stack],
      np.int32(index),
      kept,
      model=self._model,
      program=program,
    )
    self._order[layer] = stack
    self._filled[kind] = stack, index + 1

  def cache(self, lengths: Int[Array, " B"]) -> Cache:
    """The cache, when all layers have been kept."""
    return finalize_cache(
      self._prepared.plan,
      tuple(self._stacks),
      tuple(self._order),
      lengths,
      self._protected,
    )


def _empty_stack(shape: Any, count: int) -> Layer:
  """Zeros for so many layers, spread over the mesh in context."""
  stack: Layer = jax.tree.map(
    lambda x: jnp.zeros((count, *x.shape), x.dtype), shape
  )
  return shard_stack(stack)


def _shape(model: Model, program: LayerProgram, kept: Kept) -> Any:
  """What a layer is compressed to, with shapes in place of arrays."""
  leaves, structure = jax.tree.flatten(kept)
  shapes = tuple((x.shape, jnp.dtype(x.dtype)) for x in leaves)
  return _compressed_shape(model, program, structure, shapes)


@functools.lru_cache(maxsize=4096)
def _compressed_shape(
  model: Model,
  program: LayerProgram,
  structure: Any,
  shapes: Sequence[tuple[Any, Any]],
) -> Any:
  leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
  kept = jax.tree.unflatten(structure, leaves)
  return jax.eval_shape(functools.partial(compress_layer, model, program), kept)
