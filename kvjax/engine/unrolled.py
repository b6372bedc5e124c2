"""Decoding with every layer apart, for long answers on CPUs.

A CPU's matrix products cannot read a slice of a stack. A loop over layers
therefore copies weights, keys and values in every step, which takes as long as
a third of it. Without the loop nothing is copied, but the program takes seconds
to compile, as it has each layer.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache.cache import Cache
from kvjax.engine.model_layers import layer_stacks
from kvjax.engine.rerotation import RotaryModel
from kvjax.model import Attend, Geometry, LayerSpec, Model, ranks

# Tokens of an answer from which on faster steps make up for compilation.
TOKENS = 512


def pays_off(tokens: int) -> bool:
  """Whether answers of up to so many tokens are decoded without a loop."""
  one_cpu = (
    jax.default_backend() == "cpu" and jax.sharding.get_abstract_mesh().empty
  )
  return one_cpu and tokens >= TOKENS


class Unrolled(NamedTuple):
  """The weights of an `UnrolledModel`.

  Attributes:
    params: those of the model.
    layers: those of each layer, with a leading axis of 1.
  """

  params: PyTree
  layers: tuple[PyTree, ...]


@dataclasses.dataclass(frozen=True)
class UnrolledModel:
  """A model whose layers are stacks of one; see `kvjax.Model`."""

  model: Model

  @classmethod
  def of(cls, model: Model) -> "UnrolledModel":
    """Wraps a model; the result is a `RotaryModel` if the model is."""
    kind = _UnrolledRotaryModel if isinstance(model, RotaryModel) else cls
    return kind(model)

  @property
  def geometry(self) -> Geometry:
    """The model's, with a stack of weights for every layer."""
    geometry = self.model.geometry
    layers = tuple(
      dataclasses.replace(spec, weights=number)
      for number, spec in enumerate(geometry.layers)
    )
    return Geometry(layers, geometry.max_positions)

  def unroll(self, params: PyTree) -> Unrolled:
    """Takes the weights of every layer out of their stacks."""
    stacks = layer_stacks(self.model, params)
    geometry = self.model.geometry
    places = zip(geometry.layers, geometry.weight_index, strict=True)
    return Unrolled(
      params, tuple(_take(stacks[spec.weights], at) for spec, at in places)
    )

  def embed(
    self,
    params: Unrolled,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
  ) -> tuple[Float[Array, "B S E"], PyTree]:
    """See `kvjax.Model`."""
    return self.model.embed(params.params, tokens, positions)

  def layer_weights(self, params: Unrolled) -> tuple[PyTree, ...]:
    """See `kvjax.Model`."""
    return params.layers

  def block(
    self,
    weights: PyTree,
    spec: LayerSpec,
    hidden: Float[Array, "B S E"],
    shared: PyTree,
    positions: Int[Array, "B S"],
    attend: Attend,
  ) -> tuple[Float[Array, "B S E"], Any]:
    """See `kvjax.Model`."""
    own = self._own(spec)
    return self.model.block(weights, own, hidden, shared, positions, attend)

  def _own(self, spec: LayerSpec) -> LayerSpec:
    """The model's spec of a layer."""
    return self.model.geometry.layers[spec.weights]

  def normalize(
    self, params: Unrolled, hidden: Float[Array, "B S E"]
  ) -> Float[Array, "B S E"]:
    """See `kvjax.Model`."""
    return self.model.normalize(params.params, hidden)

  def logits(
    self, params: Unrolled, hidden: Float[Array, "*B E"]
  ) -> Float[Array, "*B V"]:
    """See `kvjax.Model`."""
    return self.model.logits(params.params, hidden)


class _UnrolledRotaryModel(UnrolledModel):
  """One whose keys can be rotated."""

  def rerotate(
    self,
    keys: Float[Array, "B K T D"],
    by: Int[Array, "B K T"],
    spec: LayerSpec,
  ) -> Float[Array, "B K T D"]:
    """See `RotaryModel`."""
    assert isinstance(self.model, RotaryModel)
    return self.model.rerotate(keys, by, self._own(spec))


def unroll_cache(cache: Cache) -> Cache:
  """Gives every layer a stack of its own."""
  stacks: list[Any] = []
  order = []
  for stack, place in zip(cache.order, ranks(cache.order), strict=True):
    if stack < 0:
      order.append(stack)
      continue
    order.append(len(stacks))
    stacks.append(_take(cache.stacks[stack], place))
  return dataclasses.replace(cache, stacks=tuple(stacks), order=tuple(order))


@functools.partial(jax.jit, static_argnames=("order",))
def roll_cache(cache: Cache, order: tuple[int, ...]) -> Cache:
  """Joins the layers of an unrolled cache to the stacks that it came from."""
  parts: dict[int, list[Any]] = {}
  for stack, own in zip(order, cache.order, strict=True):
    if stack >= 0:
      parts.setdefault(stack, []).append(cache.stacks[own])
  stacks = tuple(
    jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts[stack])
    for stack in range(len(parts))
  )
  return dataclasses.replace(cache, stacks=stacks, order=order)


def _take(stack: PyTree, place: int) -> PyTree:
  """Takes a layer out of a stack, without a copy where memory is aligned."""

  def take(leaf: Array) -> Array:
    view = np.asarray(leaf)[place : place + 1]
    # With the kind of memory, which may be the host's.
    taken: Array = jax.device_put(view, leaf.sharding)
    return taken

  return jax.tree.map(take, stack)
