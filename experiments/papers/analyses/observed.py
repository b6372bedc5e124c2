"""Collects the activations of a model's layers for a prompt."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.engine.forward import attend_to_prompt, hidden_states
from kvjax.model import Model


def activations(
  model: Model, params: PyTree, tokens: Sequence[int]
) -> tuple[Activations, ...]:
  """Computes queries, keys and values of every layer for one prompt."""
  return _activations(model, params, jnp.asarray([tokens], jnp.int32))


@functools.partial(jax.jit, static_argnames=("model",))
def _activations(
  model: Model, params: PyTree, tokens: Int[Array, "B S"]
) -> tuple[Activations, ...]:
  def attend(
    layer: int, state: None, layer_activations: Activations
  ) -> tuple[Float[Array, "B N S D"], Activations]:
    del layer, state
    # Drop optional activations, so that they are not computed.
    return attend_to_prompt(layer_activations), layer_activations.only(())

  index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  positions = jnp.broadcast_to(index[None], tokens.shape)
  none = (None,) * model.geometry.num_layers
  return hidden_states(model, params, tokens, positions, none, attend)[1]
