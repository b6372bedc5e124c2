"""Layers of Keras as pure functions of their weights."""

import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from kvjax.errors import InputError


def weights_of(layer: Any) -> list[Array]:
  """The weights of a layer, in the order of its variables.

  Raises:
    InputError: they are no arrays of JAX, are quantized, or have LoRA.
  """
  if getattr(layer, "lora_enabled", False):
    raise InputError(
      f"The layer {layer.name} has adapters of LoRA, which kvjax does not "
      "read; save its model's weights, which merges them, and load these into "
      "a new model."
    )
  mode = getattr(layer, "quantization_mode", None)
  if mode is not None:
    raise InputError(
      f"The layer {layer.name} is quantized to {mode}, which kvjax does not "
      "read; give a model in float32 or bfloat16."
    )
  values = [variable.value for variable in layer.variables]
  if not all(isinstance(value, jax.Array) for value in values):
    raise InputError(
      "The weights of this model are not arrays of JAX; set KERAS_BACKEND=jax "
      "before Keras is imported."
    )
  return values


def backbone_weights(
  backbone: Any, parts: Mapping[str, str]
) -> dict[str, PyTree[Array]]:
  """The weights of a backbone, those of its equal layers stacked.

  Args:
    backbone: the backbone.
    parts: names for what has weights within a decoder layer, and the attributes
      that hold it, with dots between.

  Returns:
    Lists of arrays, as `weights_of` gives them: "embed", "norm" and, by part,
    "layers", with a leading axis.

  Raises:
    InputError: see `weights_of`.
  """
  layers = [
    {
      part: weights_of(operator.attrgetter(path)(layer))
      for part, path in parts.items()
    }
    for layer in backbone.transformer_layers
  ]
  return {
    "embed": weights_of(backbone.token_embedding),
    "layers": jax.tree.map(lambda *same: jnp.stack(same), *layers),
    "norm": weights_of(backbone.layer_norm),
  }


def call(layer: Any, weights: list[Array], *args: Any, **kwargs: Any) -> Array:
  """Calls a layer of Keras as a pure function of its weights."""
  own = {
    id(variable): array
    for variable, array in zip(layer.variables, weights, strict=True)
  }
  # Which of them are trainable may change at any time.
  output: Array = layer.stateless_call(
    [own[id(variable)] for variable in layer.trainable_variables],
    [own[id(variable)] for variable in layer.non_trainable_variables],
    *args,
    **kwargs,
  )[0]
  return output
