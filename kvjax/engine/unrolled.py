"""Decoding with every layer apart, for long answers on CPUs.

A CPU's matrix products cannot read a slice of a stack. A loop over layers
therefore copies weights, keys and values in every step, which takes as long as
a third of it. Without the loop nothing is copied, but the program takes seconds
to compile, as it has each layer.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache.cache import Cache
from kvjax.engine.model_layers import layer_stacks
from kvjax.engine.rerotation import RotaryModel
from kvjax.hosts import is_traced
from kvjax.model import Attend, Geometry, LayerSpec, Model, ranks

# Tokens of an answer from which on faster steps make up for compilation.
TOKENS = 256


def layers_apart(
  model: Model, params: PyTree, tokens: int
) -> tuple[PyTree, ...] | None:
  """Takes the weights of every layer out of their stacks, if that pays off.

  They are parts of the stacks in memory, and no copies, where a layer begins at
  an aligned address.

  Args:
    model: the functions.
    params: the weights.
    tokens: most tokens of an answer.

  Returns:
    Weights of every layer, with a leading axis of 1; None where a loop is
    better: for short answers, and for weights that are not on a single CPU.
  """
  if tokens < TOKENS or not _is_on_one_cpu(params):
    return None
  stacks = layer_stacks(model, params)
  geometry = model.geometry
  places = zip(geometry.layers, geometry.weight_index, strict=True)
  return tuple(_view(stacks[spec.weights], place) for spec, place in places)


def _is_on_one_cpu(params: PyTree) -> bool:
  return jax.sharding.get_abstract_mesh().empty and all(
    isinstance(leaf, jax.Array)
    and not is_traced(leaf)
    and len(leaf.devices()) == 1
    and next(iter(leaf.devices())).platform == "cpu"
    for leaf in jax.tree.leaves(params)
  )


def _view(stack: PyTree, place: int) -> PyTree:
  def view(leaf: jax.Array) -> jax.Array:
    # NumPy does not copy what is in the memory of a CPU, nor does JAX.
    part = np.asarray(leaf)[place : place + 1]
    # As the leaf is: a commitment to a device would be another program.
    return jax.device_put(part, leaf.sharding if leaf.committed else None)

  return jax.tree.map(view, stack)


class Unrolled(NamedTuple):
  """The weights of an `UnrolledModel`.

  Attributes:
    params: those of the model.
    layers: those of `layers_apart`.
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
  """Gives every layer a stack of its own, unless its stack is one pool."""
  stacks: list[Any] = []
  order = []
  pools: dict[int, int] = {}
  for stack, place in zip(cache.order, ranks(cache.order), strict=True):
    if stack < 0:
      order.append(stack)
    elif cache.stacks[stack].separable:
      order.append(len(stacks))
      stacks.append(_take(cache.stacks[stack], place))
    else:
      if stack not in pools:
        pools[stack] = len(stacks)
        stacks.append(cache.stacks[stack])
      order.append(pools[stack])
  return dataclasses.replace(cache, stacks=tuple(stacks), order=tuple(order))


def roll_cache(cache: Cache, order: tuple[int, ...]) -> Cache:
  """Joins the layers of an unrolled cache to the stacks that it came from."""
  # Without repetitions, as all layers of a pool have one stack.
  parts: dict[int, dict[int, Any]] = {}
  for stack, own in zip(order, cache.order, strict=True):
    if stack >= 0:
      parts.setdefault(stack, {})[own] = cache.stacks[own]
  stacks = tuple(
    jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts[s].values())
    for s in range(len(parts))
  )
  return dataclasses.replace(cache, stacks=stacks, order=order)


def _take(stack: Any, place: int) -> Any:
  return jax.tree.map(lambda leaf: leaf[place : place + 1], stack)
