"""Builds the cache of a plan layer by layer."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Bool, Int

from kvjax.activations import Activations
from kvjax.allocation.base import LayerBudget
from kvjax.cache.base import Layer
from kvjax.cache.cache import Cache
from kvjax.cache.packed import PackedLayer
from kvjax.cache.pooled import PooledLayers
from kvjax.cache.sharding import shard_stack
from kvjax.engine.compress import (
  Evaluated,
  Evaluation,
  LayerInputs,
  compress_layer,
  finalize_cache,
  keep_layer,
  keep_layer_mapped,
  keep_single,
  select_layer,
)
from kvjax.engine.joined_selection import select_from_prompt
from kvjax.engine.prepared import LayerProgram, PreparedPlan
from kvjax.engine.prompt_programs import needs_states_again
from kvjax.hosts import is_traced
from kvjax.kernels.dispatch import target_platform
from kvjax.model import LayerSpec, Model
from kvjax.placement import is_on_host


class CacheBuilder:
  """Builds the cache of one plan.

  Layers with equal specs and programs share a stack. It is allocated with the
  first of them, and the others are written in place.
  """

  def __init__(
    self,
    model: Model,
    prepared: PreparedPlan,
    protected: Bool[Array, "B P"] | None,
  ) -> None:
    """Starts without any layer.

    Args:
      model: the model, which rerotates keys if the method renumbers tokens.
      prepared: the plan.
      protected: by position, tokens that must be kept, if there are any.
    """
    self._model = model
    self._prepared = prepared
    self._protected = protected
    self._evaluation = Evaluation.of(prepared.plan).without_files()
    self._budgets: list[LayerBudget] | None = None
    # What all layers keep, if the method selects once for them.
    self._joined: Int[Array, "B K T"] | None = None
    specs = model.geometry.layers
    # Layers that evict and layers that never do are in different stacks.
    self._kinds = [
      (spec, prepared.program(layer, spec), prepared.evicts(layer))
      if spec.cache
      else None
      for layer, spec in enumerate(specs)
    ]
    self._stacks: list[Layer] = []
    self._order = [-1] * len(specs)
    # For each kind, the index of its stack and the number of layers in it.
    self._filled: dict[
      tuple[LayerSpec, LayerProgram, tuple[bool, bool]], tuple[int, int]
    ] = {}

  def join(self, layers: Mapping[int, tuple[Activations, Evaluated]]) -> None:
    """Selects once for all layers, before any is kept.

    Args:
      layers: activations and evaluations, with scores, of the layers that the
        plan's method compresses.
    """
    if not layers or all(self._prepared.keeps_all):
      return
    first = next(iter(layers))
    activations = layers[first][0]
    evaluated = [of_layer for _, of_layer in layers.values()]
    budget = self._budget(first, activations)
    self._joined = select_from_prompt(
      self._evaluation, activations, evaluated, budget
    )

  def keep(
    self,
    layer: int,
    activations: Activations,
    evaluated: Evaluated | None,
    counts: Int[Array, "B K"] | None = None,
  ) -> None:
    """Compresses a layer and writes it into its stack.

    Args:
      layer: index of the layer in the model.
      activations: activations of the prompt without the optional ones, so that
        methods which had other ones share the programs.
      evaluated: evaluation by the plan's method, if there is one.
      counts: tokens that each head keeps; None for those of the plan.
    """
    kind = self._kinds[layer]
    assert kind is not None
    program = kind[1]
    num_keys = self._prepared.num_keys
    inputs = LayerInputs(
      np.int32(layer),
      activations,
      evaluated and evaluated.drop_scores(),
      self._select(layer, activations, evaluated, counts),
      None if program.retrieval is None else jnp.asarray(num_keys),
    )
    if kind in self._filled:
      stack, index = self._filled[kind]
    else:
      count = self._kinds.count(kind)
      # A layer alone is its own stack, without zeros to write it into.
      if count == 1:
        self._order[layer] = len(self._stacks)
        self._stacks.append(
          keep_single(inputs, model=self._model, program=program)
        )
        return
      # An index may be any pytree, such as a dictionary, which has no hash.
      shapes, structure = jax.tree.flatten(_shape(self._model, program, inputs))
      stack, index = len(self._stacks), 0
      empty = _empty_stack(
        shapes=tuple(shapes), structure=structure, count=count
      )
      self._stacks.append(_committed_like(activations.keys, empty))
    mapped = needs_states_again(activations)
    write = keep_layer_mapped if mapped else keep_layer
    self._stacks[stack] = write(
      self._stacks[stack],
      np.int32(index),
      inputs,
      model=self._model,
      program=program,
    )
    self._order[layer] = stack
    # Layers come in order, so places are those of `ranks(order)`.
    self._filled[kind] = stack, index + 1

  def _select(
    self,
    layer: int,
    activations: Activations,
    evaluated: Evaluated | None,
    counts: Int[Array, "B K"] | None,
  ) -> Int[Array, "B K T"] | None:
    """Selects slots to keep; None if no row evicts anything."""
    if self._prepared.keeps_all[layer]:
      return None
    if self._joined is not None:
      return self._joined
    assert evaluated is not None
    budget = self._budget(layer, activations)
    if counts is not None:
      budget = dataclasses.replace(budget, counts=counts)
    return select_layer(self._evaluation, activations, evaluated, budget)

  def _budget(self, layer: int, activations: Activations) -> LayerBudget:
    if self._budgets is None:
      slots = activations.positions.shape[1]
      self._budgets = self._prepared.budgets(slots, self._protected)
    return self._budgets[layer]

  def cache(self, lengths: Int[Array, " B"]) -> Cache:
    """Returns the cache once all layers have been kept."""
    return finalize_cache(
      self._prepared.plan,
      tuple(self._stacks),
      tuple(self._order),
      lengths,
      self._protected,
    )


def _committed_like(keys: Array, stack: Layer) -> Layer:
  """Commits a stack to the device of the keys to be written, if they are.

  Otherwise, writing the first layer would need a program of its own, or fail on
  another device than the default one.
  """
  if is_traced(keys) or not keys.committed or len(keys.devices()) > 1:
    return stack
  (device,) = keys.devices()

  def commit(leaf: Array) -> Array:
    # What belongs on the host stays there.
    kind = leaf.sharding.memory_kind
    place = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    return jax.device_put(leaf, place)

  committed: Layer = jax.tree.map(commit, stack)
  return committed


@functools.partial(jax.jit, static_argnames=("shapes", "structure", "count"))
def _empty_stack(
  *, shapes: tuple[jax.ShapeDtypeStruct, ...], structure: Any, count: int
) -> Layer:
  """Makes zeros for `count` layers, sharded over the mesh in context.

  It is one program, so that no device ever allocates all heads, nor arrays that
  belong on the host.

  Args:
    shapes: the arrays of one layer.
    structure: of that layer.
    count: the number of layers.
  """

  def zeros(x: Any) -> Array:
    make = functools.partial(jnp.zeros, (count, *x.shape), x.dtype)
    if not is_on_host(x):
      return make()
    host = compute_on(
      make, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host
    )
    zeros_on_host: Array = host()
    return zeros_on_host

  stack: Layer = jax.tree.unflatten(structure, map(zeros, shapes))
  if isinstance(stack, PooledLayers):
    stack = stack.clear()
  return shard_stack(stack)


def _shape(model: Any, program: LayerProgram, inputs: LayerInputs) -> Any:
  """Shapes of a layer after compression."""
  # `eval_shape` would trace every layer; most have the same shapes.
  leaves, structure = jax.tree.flatten(inputs)
  shapes = tuple((x.shape, jnp.dtype(x.dtype)) for x in leaves)
  # Pages are as many as the mesh can share out, and only TPUs have tiles.
  context = jax.sharding.get_abstract_mesh(), target_platform()
  return _compressed_shape(model, program, structure, shapes, context)


@functools.lru_cache(maxsize=4096)
def _compressed_shape(
  model: Any,
  program: LayerProgram,
  structure: Any,
  shapes: Sequence[tuple[Any, Any]],
  context: tuple[jax.sharding.AbstractMesh, str],
) -> Any:
  del context  # in which this is called
  leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
  inputs = jax.tree.unflatten(structure, leaves)

  def compress(inputs: LayerInputs) -> Layer:
    layer = compress_layer(model, program, inputs)
    if program.pool:
      assert isinstance(layer, PackedLayer)
      layer = PooledLayers.empty(layer, program.pool)
    return layer.offload()

  return jax.eval_shape(compress, inputs)
