"""Llama of Keras Hub, by its own functions: an example for other models.

Nothing is converted: `block` calls the layers of Keras, and hands queries, keys
and values to kvjax where Keras would attend.
"""

import dataclasses
import operator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.errors import InputError
from kvjax.model import Attend, Geometry, LayerSpec

# The layers with weights within a decoder layer.
_ATTENTION = "_self_attention_layer"
_PARTS = (
  "_self_attention_layernorm",
  f"{_ATTENTION}._query_dense",
  f"{_ATTENTION}._key_dense",
  f"{_ATTENTION}._value_dense",
  f"{_ATTENTION}._output_dense",
  "_feedforward_layernorm",
  "_feedforward_gate_dense",
  "_feedforward_intermediate_dense",
  "_feedforward_output_dense",
)
_CLASSES = ("LlamaBackbone", "Llama3Backbone")


@dataclasses.dataclass(frozen=True)
class KerasHubModel:
  """A Llama of Keras Hub as a `kvjax.Model`.

  Attributes:
    backbone: the `LlamaBackbone`; its functions are used, and not its weights.
    geometry: the sizes that a KV cache depends on.
  """

  backbone: Any
  geometry: Geometry

  def embed(
    self,
    params: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
  ) -> tuple[Float[Array, "B S E"], None]:
    """Embeds tokens; layers share nothing."""
    del positions
    return _call(self.backbone.token_embedding, params["embed"], tokens), None

  def layer_weights(self, params: PyTree) -> tuple[PyTree, ...]:
    """Returns the only stack of the layers' weights."""
    return (params["layers"],)

  def block(
    self,
    weights: PyTree,
    spec: LayerSpec,
    hidden: Float[Array, "B S E"],
    shared: None,
    positions: Int[Array, "B S"],
    attend: Attend,
  ) -> tuple[Float[Array, "B S E"], Any]:
    """Runs one layer; Keras has heads after tokens, [B, S, N, D]."""
    del spec, shared

    def run(part: str, x: Array) -> Array:
      layer = operator.attrgetter(part)(self.backbone.transformer_layers[0])
      return _call(layer, weights[part], x)

    x = run("_self_attention_layernorm", hidden)
    queries, keys, values = (
      run(f"{_ATTENTION}._{name}_dense", x)
      for name in ("query", "key", "value")
    )
    attended, state = attend(
      Activations(
        queries=jnp.swapaxes(self._rotate(queries, positions), 1, 2),
        keys=jnp.swapaxes(self._rotate(keys, positions), 1, 2),
        values=jnp.swapaxes(values, 1, 2),
        positions=positions,
        keys_unrotated=jnp.swapaxes(keys, 1, 2),
        queries_unrotated=jnp.swapaxes(queries, 1, 2),
        inputs=x,
        output_projection=weights[f"{_ATTENTION}._output_dense"][0],
      )
    )
    hidden = hidden + run(
      f"{_ATTENTION}._output_dense", jnp.swapaxes(attended, 1, 2)
    )
    x = run("_feedforward_layernorm", hidden)
    gate = self.backbone.transformer_layers[0].activation(
      run("_feedforward_gate_dense", x).astype(jnp.float32)
    )
    x = run("_feedforward_intermediate_dense", x) * gate.astype(x.dtype)
    return hidden + run("_feedforward_output_dense", x), state

  def normalize(
    self, params: PyTree, hidden: Float[Array, "B S E"]
  ) -> Float[Array, "B S E"]:
    """Applies the final norm."""
    return _call(self.backbone.layer_norm, params["norm"], hidden)

  def logits(
    self, params: PyTree, hidden: Float[Array, "*B E"]
  ) -> Float[Array, "*B V"]:
    """Computes float32 logits."""
    embedding = self.backbone.token_embedding
    logits = _call(embedding, params["embed"], hidden, reverse=True)
    return logits.astype(jnp.float32)

  def rerotate(
    self,
    keys: Float[Array, "B K T D"],
    by: Int[Array, "B K T"],
    spec: LayerSpec,
  ) -> Float[Array, "B K T D"]:
    """Moves keys that were rotated at positions p to p + `by`."""
    del spec
    # Heads become rows.
    rows = keys.reshape(-1, keys.shape[2], 1, keys.shape[3])
    moved = self._rotate(rows, by.reshape(-1, by.shape[2]))
    return moved.reshape(keys.shape)

  def _rotate(
    self, x: Float[Array, "B S H D"], positions: Int[Array, "B S"]
  ) -> Float[Array, "B S H D"]:
    attention = self.backbone.transformer_layers[0]._self_attention_layer
    return _call(attention.rotary_embedding_layer, [], x, positions=positions)


def from_keras_hub(
  backbone: Any, max_positions: int
) -> tuple[KerasHubModel, PyTree]:
  """Makes a `kvjax.Model` and its weights of a Llama of Keras Hub.

  Written against keras-hub 0.32.0, which is not imported, and runs with the
  backend JAX of Keras.

  Args:
    backbone: a `LlamaBackbone`, or that of a `LlamaCausalLM`.
    max_positions: context in tokens, which Keras Hub does not state.

  Raises:
    InputError: it is another backbone.
  """
  name = type(backbone).__name__
  if name not in _CLASSES:
    raise InputError(
      f"Of Keras Hub, kvjax runs {' and '.join(_CLASSES)}; this is a {name}."
    )
  spec = LayerSpec(
    backbone.num_query_heads,
    backbone.num_key_value_heads,
    backbone.hidden_dim // backbone.num_query_heads,
  )
  layers = {
    part: [
      jnp.stack(list(same))
      for same in zip(
        *(
          _weights(operator.attrgetter(part)(layer))
          for layer in backbone.transformer_layers
        ),
        strict=True,
      )
    ]
    for part in _PARTS
  }
  params = {
    "embed": _weights(backbone.token_embedding),
    "layers": layers,
    "norm": _weights(backbone.layer_norm),
  }
  geometry = Geometry((spec,) * backbone.num_layers, max_positions)
  return KerasHubModel(backbone, geometry), params


def _weights(layer: Any) -> list[Array]:
  return [variable.value for variable in layer.trainable_variables]


def _call(layer: Any, weights: list[Array], *args: Any, **kwargs: Any) -> Array:
  """Calls a layer of Keras as a pure function of its weights."""
  output: Array = layer.stateless_call(weights, [], *args, **kwargs)[0]
  return output
