"""Rerotation of keys to their places in the cache, as in StreamingLLM."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Rerotate
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.model import LayerSpec, Model


@runtime_checkable
class RotaryModel(Protocol):
  """A model whose rotary embedding depends on position differences alone.

  Methods that renumber tokens need one.
  """

  def rerotate(
    self,
    keys: Float[Array, "B K T D"],
    by: Int[Array, "B K T"],
    spec: LayerSpec,
  ) -> Float[Array, "B K T D"]:
    """Moves keys that a layer rotated at positions p to p + `by`.

    A layer without a rotary embedding returns its keys as they are.

    Args:
      keys: rotated keys.
      by: how far each moves.
      spec: spec of the layer.
    """
    ...


@dataclasses.dataclass(frozen=True)
class LayerRotation:
  """The rotation of a layer, hashable, for `Activations.rerotate`.

  Attributes:
    model: the model.
    spec: spec of the layer.
  """

  model: RotaryModel
  spec: LayerSpec

  def __call__(
    self, keys: Float[Array, "B K T D"], by: Int[Array, "B K T"]
  ) -> Float[Array, "B K T D"]:
    """Moves keys that were rotated at positions p to p + `by`."""
    return self.model.rerotate(keys, by, self.spec)


def check_rotary(model: Model) -> None:
  """Refuses a model that cannot rerotate keys.

  Raises:
    InputError: it has no `rerotate`, or refuses itself, or has layers with a
      window, whose tokens cannot follow the numbers of the others.
  """
  if not isinstance(model, RotaryModel):
    raise InputError(
      "rerotate needs a model that can rotate keys; "
      f"{type(model).__name__} has no "
      "`rerotate` (see kvjax.RotaryModel)."
    )
  layers = model.geometry.layers
  if any(spec.window is not None for spec in layers):
    raise InputError(
      "rerotate gives tokens the numbers of their places in the cache, and "
      "layers with a window keep other tokens; use a method without it for "
      "this model."
    )
  for spec in dict.fromkeys(spec for spec in layers if spec.cache):
    shape = (1, spec.kv_heads, 1)
    # A model may have `rerotate` and still refuse; tracing finds out.
    jax.eval_shape(
      LayerRotation(model, spec),
      jax.ShapeDtypeStruct((*shape, spec.key_dim), "float32"),
      jax.ShapeDtypeStruct(shape, "int32"),
    )


def rerotate(rotation: Rerotate, layer: LayerCache) -> LayerCache:
  """Numbers and rotates tokens by their order in the cache."""
  return _move_to(rotation, layer, _order(layer))


def close_gaps(rotation: Rerotate, layer: LayerCache) -> LayerCache:
  """Moves the tokens of a layer such that their positions have no gaps.

  The last token stays in place and those before it move up to it. Keys are
  always rerotated from the stored ones, so that rounding does not accumulate.
  """
  order = _order(layer)
  # RoPE depends on differences of positions, so the queries can stay as
  # they are if the newest token keeps its position.
  last = jnp.max(layer.positions, axis=-1, keepdims=True)
  return _move_to(rotation, layer, last + 1 + order - layer.lengths[..., None])


def _order(layer: LayerCache) -> Int[Array, "B K T"]:
  valid = layer.valid
  return jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1


def _move_to(
  rotation: Rerotate, layer: LayerCache, positions: Int[Array, "B K T"]
) -> LayerCache:
  """Rerotates tokens to the given positions."""
  valid = layer.valid
  by = jnp.where(valid, positions - layer.positions, 0)
  return dataclasses.replace(
    layer,
    keys=rotation(layer.keys, by),
    positions=jnp.where(valid, positions, -1),
  )
