"""The decoder as a `kvjax.Model` of pure functions."""

import dataclasses
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from kvjax.errors import InputError
from kvjax.model import Attend, Geometry, LayerSpec
from kvjax.models.decoder import Decoder, Layer, Tables, get_base
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class DecoderModel:
  """A decoder as a `kvjax.Model`; its weights are the argument `params`.

  Attributes:
    graphdef: graph of the whole decoder, to merge with `params`.
    layer: graph of one layer, to merge with the weights of one layer.
    geometry: the sizes that a KV cache depends on.
    rope: the rotary embedding.
  """

  graphdef: nnx.GraphDef[Decoder]
  layer: nnx.GraphDef[Layer]
  geometry: Geometry
  rope: Rope

  def embed(
    self,
    params: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
  ) -> tuple[Float[Array, "B S E"], Tables]:
    """Embeds tokens and computes the RoPE tables."""
    return nnx.merge(self.graphdef, params).embed(tokens, positions)

  def layer_weights(self, params: PyTree) -> tuple[PyTree, ...]:
    """Returns the layers' weights, which are in one stack."""
    return (params["layers"],)

  def block(
    self,
    weights: PyTree,
    spec: LayerSpec,
    hidden: Float[Array, "B S E"],
    shared: Tables,
    positions: Int[Array, "B S"],
    attend: Attend,
  ) -> tuple[Float[Array, "B S E"], Any]:
    """Runs one layer over a block of tokens."""
    del spec
    layer = nnx.merge(self.layer, weights)
    return layer(hidden, positions, shared, attend)

  def normalize(
    self, params: PyTree, hidden: Float[Array, "B S E"]
  ) -> Float[Array, "B S E"]:
    """Applies the final norm."""
    return nnx.merge(self.graphdef, params).norm(hidden)

  def logits(
    self, params: PyTree, hidden: Float[Array, "*B E"]
  ) -> Float[Array, "*B V"]:
    """Computes float32 logits of normalized hidden states."""
    return nnx.merge(self.graphdef, params).logits(hidden)

  def rerotate(
    self, keys: Float[Array, "B K T D"], by: Int[Array, "B K T"]
  ) -> Float[Array, "B K T D"]:
    """Moves keys that were rotated at positions p to p + `by`.

    Raises:
      InputError: the rotary embedding depends on the length of the row.
    """
    return self.rope.rerotate(keys, by)


def from_decoder(decoder: Decoder) -> tuple[DecoderModel, nnx.State]:
  """Splits a decoder into its functions and its weights.

  Raises:
    InputError: the decoder's config asks for layers of other sizes than its
      weights have.
  """
  config = decoder.config
  _check_layers(decoder.layers, config.geometry)
  graphdef, params = nnx.split(decoder)
  # The graph of the stack has no axis of layers: it also fits one layer.
  layer = nnx.graphdef(decoder.layers)
  return DecoderModel(graphdef, layer, config.geometry, config.rope), params


def _check_layers(layers: Layer, geometry: Geometry) -> None:
  """Refuses stacked weights that do not match the layers' specs."""
  attention = layers.self_attn
  stacked = {
    name: get_base(getattr(attention, f"{name}_proj")).kernel.shape
    for name in ("q", "k", "v")
  }
  for shape in stacked.values():
    if shape[0] != geometry.num_layers:
      raise InputError(
        f"The config has {geometry.num_layers} layers, but the weights are of "
        f"{shape[0]}."
      )
  for layer, spec in enumerate(geometry.layers):
    expected = {
      "q": spec.heads * spec.key_dim,
      "k": spec.kv_heads * spec.key_dim,
      "v": spec.kv_heads * spec.value_width,
    }
    for name, width in expected.items():
      if stacked[name][-1] != width:
        raise InputError(
          f"The config asks for a {name}_proj of width {width} in layer "
          f"{layer}, but the weights have {stacked[name][-1]}."
        )
