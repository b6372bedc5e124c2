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
from kvjax.models.adapters.keras_layers import backbone_weights, call

Tokens = Int[Array, "B S"]
Hidden = Float[Array, "B S E"]
Heads = Float[Array, "B S H D"]

# The layers with weights within a decoder layer.
_PARTS = {
  "norm": "_self_attention_layernorm",
  "query": "_self_attention_layer._query_dense",
  "key": "_self_attention_layer._key_dense",
  "value": "_self_attention_layer._value_dense",
  "output": "_self_attention_layer._output_dense",
  "mlp_norm": "_feedforward_layernorm",
  "gate": "_feedforward_gate_dense",
  "up": "_feedforward_intermediate_dense",
  "down": "_feedforward_output_dense",
}
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
    self, params: PyTree, tokens: Tokens, positions: Tokens
  ) -> tuple[Hidden, None]:
    """Embeds tokens; layers share nothing."""
    return call(self.backbone.token_embedding, params["embed"], tokens), None

  def layer_weights(self, params: PyTree) -> tuple[PyTree, ...]:
    """Returns the only stack of the layers' weights."""
    return (params["layers"],)

  def block(
    self,
    weights: PyTree,
    spec: LayerSpec,
    hidden: Hidden,
    shared: None,
    positions: Tokens,
    attend: Attend,
  ) -> tuple[Hidden, Any]:
    """Runs one layer; Keras has heads after tokens, [B, S, N, D]."""
    layer = self.backbone.transformer_layers[0]

    def run(part: str, x: Array) -> Array:
      own = operator.attrgetter(_PARTS[part])(layer)
      return call(own, weights[part], x)

    x = run("norm", hidden)
    queries, keys, values = (run(name, x) for name in ("query", "key", "value"))
    activations = Activations(
      queries=jnp.swapaxes(self._rotate(queries, positions), 1, 2),
      keys=jnp.swapaxes(self._rotate(keys, positions), 1, 2),
      values=jnp.swapaxes(values, 1, 2),
      positions=positions,
      keys_unrotated=jnp.swapaxes(keys, 1, 2),
      queries_unrotated=jnp.swapaxes(queries, 1, 2),
      inputs=x,
      output_projection=weights["output"][0],
    )
    attended, state = attend(activations)
    hidden = hidden + run("output", jnp.swapaxes(attended, 1, 2))
    x = run("mlp_norm", hidden)
    gate = layer.activation(run("gate", x).astype(jnp.float32))
    return hidden + run("down", run("up", x) * gate.astype(x.dtype)), state

  def normalize(self, params: PyTree, hidden: Hidden) -> Hidden:
    """Applies the final norm."""
    return call(self.backbone.layer_norm, params["norm"], hidden)

  def logits(
    self, params: PyTree, hidden: Float[Array, "*B E"]
  ) -> Float[Array, "*B V"]:
    """Computes float32 logits."""
    output = self.backbone.token_embedding
    logits = call(output, params["embed"], hidden, reverse=True)
    return logits.astype(jnp.float32)

  def rerotate(
    self,
    keys: Float[Array, "B K T D"],
    by: Int[Array, "B K T"],
    spec: LayerSpec,
  ) -> Float[Array, "B K T D"]:
    """Moves keys that were rotated at positions p to p + `by`."""
    # Heads become rows.
    rows = keys.reshape(-1, keys.shape[2], 1, keys.shape[3])
    moved = self._rotate(rows, by.reshape(-1, by.shape[2]))
    return moved.reshape(keys.shape)

  def _rotate(self, x: Heads, positions: Tokens) -> Heads:
    attention = self.backbone.transformer_layers[0]._self_attention_layer
    return call(attention.rotary_embedding_layer, [], x, positions=positions)


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
    InputError: it is another backbone, has adapters of LoRA or is quantized, or
      Keras runs with another backend.
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
  geometry = Geometry((spec,) * backbone.num_layers, max_positions)
  return KerasHubModel(backbone, geometry), backbone_weights(backbone, _PARTS)
