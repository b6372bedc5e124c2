"""The decoder as a `kvjax.Model` of pure functions."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from kvjax.errors import InputError
from kvjax.model import Attend, Geometry, LayerSpec
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder, Layer, get_base
from kvjax.models.rope import Rope, Tables


@dataclasses.dataclass(frozen=True)
class DecoderModel:
  """A decoder as a `kvjax.Model`; its weights are the argument `params`.

  Attributes:
    graphdef: graph of the whole decoder, to merge with `params`.
    layers: for each kind of layer, the graph of one, to merge with the weights
      of one layer.
    geometry: the sizes that a KV cache depends on.
    config: sizes and options.
  """

  # `repr` leaves out what follows from the configuration.
  graphdef: nnx.GraphDef[Decoder] = dataclasses.field(repr=False)
  layers: tuple[nnx.GraphDef[Layer], ...] = dataclasses.field(repr=False)
  geometry: Geometry = dataclasses.field(repr=False)
  config: DecoderConfig

  def __hash__(self) -> int:
    return self._hash

  def __getstate__(self) -> dict[str, Any]:
    # Hashes of texts differ between processes.
    return {name: x for name, x in vars(self).items() if name != "_hash"}

  @functools.cached_property
  def _hash(self) -> int:
    # Every call of a compiled program asks for it, and graphs are large.
    return hash((self.graphdef, self.layers, self.geometry, self.config))

  @property
  def vocab_size(self) -> int:
    """Number of token ids that the model embeds."""
    return self.config.vocab_size

  @property
  def rope(self) -> Rope:
    """The rotary embedding of layers without a window."""
    return self.config.rope

  def embed(
    self,
    params: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
  ) -> tuple[Float[Array, "B S E"], dict[str, Tables]]:
    """Embeds tokens and computes the RoPE tables."""
    return nnx.merge(self.graphdef, params).embed(tokens, positions)

  def layer_weights(self, params: PyTree) -> tuple[PyTree, ...]:
    """Returns the layers' weights, a stack for each kind of layer."""
    return tuple(params["layers"][number] for number in range(len(self.layers)))

  def block(
    self,
    weights: PyTree,
    spec: LayerSpec,
    hidden: Float[Array, "B S E"],
    shared: dict[str, Tables],
    positions: Int[Array, "B S"],
    attend: Attend,
  ) -> tuple[Float[Array, "B S E"], Any]:
    """Runs one layer over a block of tokens."""
    layer = nnx.merge(self.layers[spec.weights], weights)
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
    self,
    keys: Float[Array, "B K T D"],
    by: Int[Array, "B K T"],
    spec: LayerSpec,
  ) -> Float[Array, "B K T D"]:
    """Moves keys that a layer rotated at positions p to p + `by`.

    Keys of a layer without a rotary embedding are the same everywhere.

    Raises:
      InputError: the rotary embedding depends on the length of the row.
    """
    name = self.config.kinds[spec.weights].rope
    return keys if name is None else self.config.ropes[name].rerotate(keys, by)


def from_decoder(decoder: Decoder) -> tuple[DecoderModel, nnx.State]:
  """Splits a decoder into its functions and its weights.

  Raises:
    InputError: the decoder's config asks for layers of other sizes than its
      weights have.
  """
  config = decoder.config
  for number, stack in enumerate(decoder.layers):
    _check_layers(stack, number, config.geometry)
  graphdef, params = nnx.split(decoder)
  # The graph of a stack has no axis of layers: it also fits one layer.
  layers = tuple(nnx.graphdef(stack) for stack in decoder.layers)
  return DecoderModel(graphdef, layers, config.geometry, config), params


def as_shapes(
  config: DecoderConfig, dtype: DTypeLike
) -> tuple[DecoderModel, nnx.State]:
  """Returns the functions of a model, and its weights as shapes.

  Args:
    config: the model.
    dtype: dtype of the weights.
  """
  return from_decoder(
    nnx.eval_shape(
      lambda: Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    )
  )


def _check_layers(layers: Layer, number: int, geometry: Geometry) -> None:
  """Refuses stacked weights that do not match the specs of their layers."""
  attention = layers.self_attn
  stacked = {
    name: get_base(getattr(attention, f"{name}_proj")).kernel.shape
    for name in ("q", "k", "v")
  }
  specs = {
    layer: spec
    for layer, spec in enumerate(geometry.layers)
    if spec.weights == number
  }
  for shape in stacked.values():
    if shape[0] != len(specs):
      raise InputError(
        f"The config has {len(specs)} layers, but the weights are of "
        f"{shape[0]}."
      )
  for layer, spec in specs.items():
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
