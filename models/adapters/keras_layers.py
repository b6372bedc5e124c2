"""Layers of Keras as pure functions of their weights."""

from typing import Any

import jax
from jaxtyping import Array

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
