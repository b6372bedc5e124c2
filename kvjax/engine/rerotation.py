"""Keys turned to their places in the cache, as StreamingLLM does."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.model import Model


@runtime_checkable
class RotaryModel(Protocol):
  """A model whose rotary embedding depends on differences of positions alone.

  Methods that renumber what they keep need one.
  """

  def rerotated(
    self, keys: Float[Array, "B K T D"], by: Int[Array, "B K T"]
  ) -> Float[Array, "B K T D"]:
    """Keys rotated at positions p as if they had been at p + `by`."""
    ...


def check_rotary(model: Model) -> None:
  """Refuses a model that cannot turn keys.

  Raises:
    InputError: it has no `rerotated`, or refuses itself.
  """
  if not isinstance(model, RotaryModel):
    raise InputError(
      f"rerotate needs a model that turns keys; {type(model).__name__} has no "
      "`rerotated` (see kvjax.engine.rerotation.RotaryModel)."
    )
  spec = model.geometry.layers[0]
  shape = (1, spec.kv_heads, 1)
  jax.eval_shape(
    model.rerotated,
    jax.ShapeDtypeStruct((*shape, spec.key_dim), "float32"),
    jax.ShapeDtypeStruct(shape, "int32"),
  )


def rerotate(model: Model, layer: LayerCache) -> LayerCache:
  """Numbers and rotates tokens by their order in the cache."""
  return _turned(model, layer, _order(layer))


def close_up(model: Model, layer: LayerCache) -> LayerCache:
  """Turns a layer to what a block at its end sees when no token is missing.

  The last token stays where it is and those before it move up to it. Keys are
  turned from what is stored, each time anew, so that rounding does not add up.
  """
  order = _order(layer)
  last = jnp.max(layer.positions, axis=-1, keepdims=True)
  return _turned(model, layer, last + 1 + order - layer.lengths[..., None])


def _order(layer: LayerCache) -> Int[Array, "B K T"]:
  valid = layer.valid
  return jnp.cumsum(valid.astype(jnp.int32), axis=-1) - 1


def _turned(
  model: Model, layer: LayerCache, places: Int[Array, "B K T"]
) -> LayerCache:
  """The tokens as if they had stood at `places`."""
  assert isinstance(model, RotaryModel)
  valid = layer.valid
  by = jnp.where(valid, places - layer.positions, 0)
  return dataclasses.replace(
    layer,
    keys=model.rerotated(layer.keys, by),
    positions=jnp.where(valid, places, -1),
  )
