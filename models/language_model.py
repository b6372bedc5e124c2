"""The decoder as the pure functions that the engine calls."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from kvjax.model import Attend, Geometry
from kvjax.models.decoder import Decoder
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class DecoderModel:
  """A `kvjax.model.Model`: hashable, its weights live in `params`."""

  graphdef: nnx.GraphDef[Decoder]
  geometry: Geometry
  rope: Rope

  def hidden(
    self,
    params: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    states: Sequence[Any],
    attend: Attend[Any],
  ) -> tuple[Float[Array, "B S E"], tuple[Any, ...]]:
    """See `kvjax.model.Model.hidden`."""
    decoder = nnx.merge(self.graphdef, params)
    return decoder(tokens, positions, states, attend)

  def logits(
    self, params: PyTree, hidden: Float[Array, "*B E"]
  ) -> Float[Array, "*B V"]:
    """See `kvjax.model.Model.logits`."""
    return nnx.merge(self.graphdef, params).logits(hidden)

  def rerotated(
    self, keys: Float[Array, "B K T D"], by: Int[Array, "B K T"]
  ) -> Float[Array, "B K T D"]:
    """See `kvjax.engine.rerotation.RotaryModel`.

    Raises:
      InputError: the rotary embedding depends on the length of the row.
    """
    return self.rope.turned(keys, by)


def from_decoder(decoder: Decoder) -> tuple[DecoderModel, nnx.State]:
  """Splits a decoder into its functions and its weights."""
  graphdef, params = nnx.split(decoder)
  config = decoder.config
  return DecoderModel(graphdef, config.geometry, config.rope), params
