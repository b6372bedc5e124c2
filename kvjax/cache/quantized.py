"""Kept keys and values in eight bits, with a scale for each token of a head."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.cache.layers import Layer, LayerCache, Slots
from kvjax.cache.packed import PackedLayer
from kvjax.kernels.quantised import Quantised, quantise
from kvjax.struct import struct

# What plans and flags call the dtypes.
STORAGES: Mapping[str, DTypeLike] = {
  "int8": jnp.int8,
  "fp8": jnp.float8_e4m3fn,
}


@struct
class QuantisedLayer(Slots):
  """Slots in eight bits; what is appended is rounded too.

  No method chooses among them: it would judge what rounding has left.
  """

  keys: Quantised
  values: Quantised


def stored(layer: Layer, storage: str) -> Layer:
  """A layer as it is kept once its method has chosen; attention still reads it.

  Args:
    layer: keys and values as they were computed.
    storage: what they are rounded to, one of `STORAGES`.
  """
  dtype = STORAGES[storage]

  def rounded(x: Float[Array, "*B T D"] | Quantised) -> Quantised:
    assert not isinstance(x, Quantised)
    return quantise(x, dtype)

  if isinstance(layer, PackedLayer):
    keys, values = rounded(layer.pages.keys), rounded(layer.pages.values)
    pages = dataclasses.replace(layer.pages, keys=keys, values=values)
    tail = stored(layer.tail, storage)
    assert isinstance(tail, Slots)
    return PackedLayer(pages, tail)
  assert isinstance(layer, LayerCache)
  keys, values = rounded(layer.keys), rounded(layer.values)
  return QuantisedLayer(keys, values, layer.positions, layer.cursor)
