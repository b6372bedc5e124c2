"""The layers of a model, and checks that they do what their specs say."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.engine.rerotation import LayerRotation, RotaryModel
from kvjax.errors import InputError
from kvjax.model import LayerSpec, Model


def layer_stacks(model: Model, params: PyTree) -> tuple[PyTree, ...]:
  """Returns `Model.layer_weights` after checking them against the specs.

  Raises:
    InputError: they are no tuple, a stack has another number of layers than its
      specs, or a spec names a stack that does not exist.
  """
  stacks: Any = model.layer_weights(params)
  if not isinstance(stacks, tuple | list):
    raise InputError(
      "layer_weights returns a tuple of stacks of layers; that of "
      f"{type(model).__name__} returns a {type(stacks).__name__}."
    )
  specs = collections.Counter(spec.weights for spec in model.geometry.layers)
  for number, count in specs.items():
    if not 0 <= number < len(stacks):
      raise InputError(
        f"A layer's spec has weights={number}; this model's layer_weights are "
        f"{len(stacks)}, numbered from 0."
      )
    valid = {leaf.shape[:1] for leaf in jax.tree.leaves(stacks[number])}
    if valid != {(count,)}:
      raise InputError(
        f"layer_weights {number} must hold the {count} layers whose specs name "
        "them, along the leading axis of every leaf; the axes have "
        f"{', '.join(str(*size) for size in sorted(valid)) or 'no'} layers."
      )
  return tuple(stacks)


def run_block(
  model: Model,
  weights: PyTree,
  spec: LayerSpec,
  hidden: Float[Array, "B S E"],
  shared: PyTree,
  positions: Int[Array, "B S"],
  attend: Callable[[Activations], tuple[Float[Array, "B N S Dv"], Any]],
) -> tuple[Float[Array, "B S E"], Any]:
  """Runs a layer by `Model.block` and checks what it does.

  Arguments and results are those of `Model.block`.

  Raises:
    InputError: the block contradicts the spec, or does not return the hidden
      states and the state of its attention.
  """
  states: list[Any] = []

  def attend_once(
    activations: Activations,
  ) -> tuple[Float[Array, "B N S Dv"], Any]:
    activations = _attach_spec(spec, activations)
    activations = attach_rotation(model, spec, activations)
    output, state = attend(activations)
    states.append(state)
    return output, state

  result: Any = model.block(
    weights, spec, hidden, shared, positions, attend_once
  )
  # One call, whose state is what the block returned.
  structures = list(map(jax.tree.structure, states))
  if (
    not isinstance(result, tuple | list)
    or len(result) != 2
    or (spec.cache and structures != [jax.tree.structure(result[1])])
  ):
    raise InputError(
      "A layer's block returns the hidden states and the state that attend "
      "returned, after it has called attend once; that of "
      f"{type(model).__name__} does not."
    )
  hidden, state = result
  return hidden, state


def _attach_spec(spec: LayerSpec, activations: Activations) -> Activations:
  """Attaches the attention options of a layer after checking the shapes.

  Raises:
    InputError: the layer has no cache, or the sizes of its heads or the
      presence of sinks contradict the spec.
  """
  if not spec.cache:
    raise InputError(
      "A layer whose spec says cache=False has nothing to attend to; its block "
      "must not call attend."
    )
  queries, keys = activations.queries.shape, activations.keys.shape
  sizes = (queries[1], keys[1], keys[3], activations.values.shape[3])
  expected = (spec.heads, spec.kv_heads, spec.key_dim, spec.value_width)
  if sizes != expected or queries[3] != keys[3]:
    raise InputError(
      "A layer projects what its spec says; this one has query heads, KV "
      f"heads, key and value widths {sizes}, and its spec {expected}."
    )
  if (activations.sinks is not None) != spec.sinks:
    raise InputError(
      "A layer has sinks where its spec says so; this one "
      f"{'has none' if spec.sinks else 'has some, and its spec says none'}."
    )
  return dataclasses.replace(activations, attention=spec.attention)


def attach_rotation(
  model: Model, spec: LayerSpec, activations: Activations
) -> Activations:
  """Attaches the layer's rotation, unless its block has passed its own."""
  if activations.rerotate is not None or not isinstance(model, RotaryModel):
    return activations
  return dataclasses.replace(activations, rerotate=LayerRotation(model, spec))


def index_layer(stack: PyTree, layer: Int[Array, ""] | int) -> PyTree:
  """Returns one layer of a stack, without the leading axis."""
  return jax.tree.map(
    lambda x: (
      jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
      if isinstance(layer, jax.Array)
      else x[layer]
    ),
    stack,
  )
