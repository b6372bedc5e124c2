"""Builds the cache of a plan layer by layer."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

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
from kvjax.engine.ahead import Call, compile_together
from kvjax.engine.compress import (
  Evaluated,
  Evaluation,
  LayerInputs,
  compress_layer,
  finalize_cache,
  keep_layer,
  keep_single,
  select_layer,
)
from kvjax.engine.prepared import LayerProgram, PreparedPlan
from kvjax.hosts import is_traced
from kvjax.model import LayerSpec, Model
from kvjax.placement import is_on_host


class Source(NamedTuple):
  """What the cache of a layer is made from.

  Attributes:
    activations: activations of the prompt without the optional ones, so that
      methods which had other ones share the programs.
    evaluated: evaluation by the plan's method, if there is one.
    counts: tokens that each head keeps; None for those of the plan.
  """

  activations: Activations
  evaluated: Evaluated | None
  counts: Int[Array, "B K"] | None = None


class _Kind(NamedTuple):
  """What layers of one stack have in common.

  Attributes:
    spec: spec of the layer.
    program: the static arguments of its program.
    evicts: whether it evicts from the prompt, and while decoding.
  """

  spec: LayerSpec
  program: LayerProgram
  evicts: tuple[bool, bool]


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
    self._budgets: list[LayerBudget] | None = None
    specs = model.geometry.layers
    # Layers that evict and layers that never do are in different stacks.
    self._kinds = [
      _Kind(spec, prepared.program(layer, spec), prepared.evicts(layer))
      if spec.cache
      else None
      for layer, spec in enumerate(specs)
    ]
    self._stacks: list[Layer] = []
    self._order = [-1] * len(specs)
    # For each kind, the index of its stack and the number of layers in it.
    self._filled: dict[_Kind, tuple[int, int]] = {}

  def keep(self, layer: int, source: Source) -> None:
    """Compresses a layer and writes it into its stack."""
    self.write(layer, self.select(layer, source))

  def selection_call(self, layer: int, source: Source) -> Call | None:
    """What selects the slots to keep; None if no row evicts anything."""
    if self._prepared.keeps_all[layer]:
      return None
    assert source.evaluated is not None
    if self._budgets is None:
      slots = source.activations.positions.shape[1]
      self._budgets = self._prepared.budgets(slots, self._protected)
    budget = self._budgets[layer]
    if source.counts is not None:
      budget = dataclasses.replace(budget, counts=source.counts)
    return Call(
      select_layer,
      dict(
        activations=source.activations,
        evaluated=source.evaluated,
        budget=budget,
      ),
      dict(evaluation=Evaluation.of(self._prepared.plan)),
    )

  def select(self, layer: int, source: Source) -> LayerInputs:
    """Selects the slots to keep, and returns all that `write` needs."""
    selection, evaluated = self.selection_call(layer, source), source.evaluated
    retrieves = self._kind(layer).program.retrieval is not None
    return LayerInputs(
      np.int32(layer),
      source.activations,
      evaluated and evaluated.drop_scores(),
      selection and selection(),
      jnp.asarray(self._prepared.num_keys) if retrieves else None,
    )

  def allocation_call(self, layer: int, inputs: LayerInputs) -> Call | None:
    """What allocates the stack that a layer needs; None if there is one."""
    kind = self._kind(layer)
    count = self._kinds.count(kind)
    # A layer alone is its own stack, without zeros to write it into.
    if kind in self._filled or count == 1:
      return None
    shape = _shape(self._model, kind.program, inputs)
    return Call(_empty_stack, {}, dict(shape=shape, count=count))

  def writing_call(self, layer: int, inputs: LayerInputs) -> Call:
    """What compresses a layer, and writes it if it has a stack."""
    kind = self._kind(layer)
    static = dict(model=self._model, program=kind.program)
    place = self._filled.get(kind)
    if place is None:
      return Call(keep_single, dict(inputs=inputs), static)
    stack, index = place
    return Call(
      keep_layer,
      dict(stack=self._stacks[stack], index=np.int32(index), inputs=inputs),
      static,
    )

  def allocate(self, layer: int, inputs: LayerInputs) -> None:
    """Allocates the stack that a layer needs, if there is none yet."""
    allocation = self.allocation_call(layer, inputs)
    if allocation is not None:
      self._filled[self._kind(layer)] = len(self._stacks), 0
      self._stacks.append(_commit_like(inputs.activations.keys, allocation()))

  def has_stack(self, layer: int) -> bool:
    """Whether a layer of the same kind has been kept."""
    return self._kind(layer) in self._filled

  def write(self, layer: int, inputs: LayerInputs) -> None:
    """Compresses a layer and writes it into its stack."""
    self.allocate(layer, inputs)
    written = self.writing_call(layer, inputs)()
    kind = self._kind(layer)
    # Layers come in order, so places are those of `ranks(order)`.
    stack, index = self._filled.get(kind, (len(self._stacks), 0))
    self._stacks[stack : stack + 1] = [written]
    self._order[layer] = stack
    if kind in self._filled:
      self._filled[kind] = stack, index + 1

  def _kind(self, layer: int) -> _Kind:
    """The kind of a layer that has a cache."""
    kind = self._kinds[layer]
    assert kind is not None
    return kind

  def cache(self, lengths: Int[Array, " B"]) -> Cache:
    """Returns the cache once all layers have been kept."""
    return finalize_cache(
      self._prepared.plan,
      tuple(self._stacks),
      tuple(self._order),
      lengths,
      self._protected,
    )


def keep_all(
  layer: int, keeping: Sequence[tuple[CacheBuilder, Source]]
) -> None:
  """Compresses a layer by many plans, whose programs are compiled together.

  Args:
    layer: index of the layer in the model.
    keeping: the builders, and what they keep.
  """
  # Layers of one kind share programs.
  known = all(builder.has_stack(layer) for builder, _ in keeping)
  if known or len(keeping) == 1:
    for builder, source in keeping:
      builder.keep(layer, source)
    return
  compile_together(
    _present(b.selection_call(layer, source) for b, source in keeping)
  )
  selected = [(b, b.select(layer, source)) for b, source in keeping]
  compile_together(_present(b.allocation_call(layer, x) for b, x in selected))
  for builder, inputs in selected:
    builder.allocate(layer, inputs)
  compile_together(b.writing_call(layer, inputs) for b, inputs in selected)
  for builder, inputs in selected:
    builder.write(layer, inputs)


def _commit_like(keys: Array, stack: Layer) -> Layer:
  """Commits a stack to its device if the keys to write are committed to it.

  The first layer would have a program of its own otherwise.
  """
  if is_traced(keys) or not keys.committed or len(keys.devices()) > 1:
    return stack
  committed: Layer = jax.tree.map(
    lambda leaf: jax.device_put(leaf, leaf.sharding), stack
  )
  return committed


def _present(calls: Iterable[Call | None]) -> Iterator[Call]:
  return (call for call in calls if call is not None)


@functools.partial(jax.jit, static_argnames=("shape", "count"))
def _empty_stack(*, shape: Any, count: int) -> Layer:
  """Makes zeros for `count` layers, sharded over the mesh in context.

  It is one program, so that no device ever allocates all heads, nor arrays that
  belong on the host.
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

  stack: Layer = jax.tree.map(zeros, shape)
  if isinstance(stack, PooledLayers):
    stack = stack.clear()
  return shard_stack(stack)


def _shape(model: Any, program: LayerProgram, inputs: LayerInputs) -> Any:
  """Shapes of a layer after compression."""
  # `eval_shape` would trace every layer; most have the same shapes.
  leaves, structure = jax.tree.flatten(inputs)
  shapes = tuple((x.shape, jnp.dtype(x.dtype)) for x in leaves)
  # Pages are as many as the mesh can share out.
  mesh = jax.sharding.get_abstract_mesh()
  return _compressed_shape(model, program, structure, shapes, mesh)


@functools.lru_cache(maxsize=4096)
def _compressed_shape(
  model: Any,
  program: LayerProgram,
  structure: Any,
  shapes: Sequence[tuple[Any, Any]],
  mesh: jax.sharding.AbstractMesh,
) -> Any:
  del mesh  # in context
  leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
  inputs = jax.tree.unflatten(structure, leaves)

  def compress(inputs: LayerInputs) -> Layer:
    layer = compress_layer(model, program, inputs)
    if program.pool:
      assert isinstance(layer, PackedLayer)
      layer = PooledLayers.empty(layer, program.pool)
    return layer.offload()

  return jax.eval_shape(compress, inputs)
