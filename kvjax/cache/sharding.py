"""Where caches live on a mesh of the axes "data" and "model"."""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, PartitionSpec

from kvjax.cache.layers import Layer
from kvjax.cache.packed import PackedLayer
from kvjax.cache.placement import is_on_host
from kvjax.errors import InputError

AXES = ("data", "model")


def parse_mesh(text: str) -> jax.sharding.Mesh:
  """The mesh that a flag such as `data:2,model:2` asks for.

  Raises:
    InputError: an unknown axis, a size that is no number, or more devices
      than there are.
  """
  sizes = dict.fromkeys(AXES, 1)
  for part in text.split(","):
    axis, _, size = part.partition(":")
    if axis not in sizes or not size.isdigit() or int(size) < 1:
      raise InputError(
        f"A mesh is written as data:2,model:2; {part!r} does not fit."
      )
    sizes[axis] = int(size)
  count = sizes["data"] * sizes["model"]
  devices = jax.devices()
  if count > len(devices):
    raise InputError(
      f"The mesh {text} needs {count} devices; there are {len(devices)}."
    )
  return jax.make_mesh(
    tuple(sizes.values()),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=devices[:count],
  )


def shard_cache[L: Layer](cache: L) -> L:
  """Asks for batch over "data" and KV heads over "model".

  Without a mesh in context (`jax.set_mesh`) nothing happens; an axis that does
  not divide evenly stays whole, and pages have no axis of heads.
  """
  if isinstance(cache, PackedLayer):
    pages = _constrained(cache.pages, AXES[:1])
    return dataclasses.replace(cache, pages=pages, tail=shard_cache(cache.tail))
  return _constrained(cache, AXES)


def _constrained[Tree](tree: Tree, axes: Sequence[str]) -> Tree:
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return tree

  def constrain(leaf: jax.Array) -> jax.Array:
    # Outside of programs a constraint would bring it to the devices.
    stays = is_on_host(leaf) and not isinstance(leaf, jax.core.Tracer)
    if leaf.ndim < 2 or stays:
      return leaf
    spec = PartitionSpec(
      *(
        axis if leaf.shape[i] % mesh.shape[axis] == 0 else None
        for i, axis in enumerate(axes)
      )
    )
    return jax.lax.with_sharding_constraint(leaf, spec)

  return jax.tree.map(constrain, tree)
