"""Sharding of caches over a mesh; see `kvjax.kernels.mesh_axes`."""

import functools
import math
import re
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, PartitionSpec

from kvjax.cache.base import AXES, Layer
from kvjax.errors import InputError
from kvjax.kernels.mesh_axes import GROUP, MODEL, spread_over
from kvjax.placement import is_on_host

_SIZE = re.compile("[1-9][0-9]{0,8}")
# Characters of a flag that a message repeats.
_SHOWN = 60


def parse_sizes(text: str) -> dict[str, int]:
  """Reads the sizes of the axes of a mesh from `data:2,model:2`.

  An axis that is left out has size 1.

  Raises:
    InputError: an unknown axis or one that is given twice, or a size that is no
      number.
  """
  given: dict[str, int] = {}
  for part in text.split(","):
    axis, _, size = part.partition(":")
    if axis not in AXES or not _SIZE.fullmatch(size):
      raise InputError(
        f"A mesh is written as data:2,model:2; {part[:_SHOWN]!r} does not fit."
      )
    if axis in given:
      raise InputError(
        f"The mesh {text[:_SHOWN]} has the axis {axis!r} twice; give it once."
      )
    given[axis] = int(size)
  return {axis: given.get(axis, 1) for axis in AXES}


def parse_mesh(text: str) -> jax.sharding.Mesh:
  """Makes the mesh that a flag such as `data:2,model:2` describes.

  Raises:
    InputError: see `parse_sizes`, or more devices than this host has.
  """
  sizes = parse_sizes(text)
  count = sizes["data"] * sizes["model"]
  # Those of other hosts cannot be read from here.
  devices = jax.local_devices()
  if count > len(devices):
    found = "there are" if jax.process_count() == 1 else "a host has"
    raise InputError(
      f"The mesh {text} needs {count} devices; {found} {len(devices)}."
    )
  return jax.make_mesh(
    tuple(sizes.values()),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=devices[:count],
  )


def split_mesh(mesh: jax.sharding.Mesh, kv_heads: int) -> jax.sharding.Mesh:
  """Splits the axis "model" of a mesh so that KV heads divide evenly.

  The new "model" has as many devices as divide both the old one and the number
  of KV heads; the rest become the axis "group", whose devices have the same KV
  heads. Query heads, MLP, vocabulary and pages are still shared out over all.

  Args:
    mesh: a mesh with an axis "model".
    kv_heads: number of KV heads of a layer.

  Returns:
    The mesh with a third axis; the same one if the axis divides the KV heads.

  Examples:
    >>> from kvjax.cache.sharding import parse_mesh, split_mesh
    >>> split_mesh(parse_mesh("model:1"), kv_heads=3).shape["model"]
    1
  """
  size = mesh.shape[MODEL]
  parts = math.gcd(kv_heads, size)
  if parts == size:
    return mesh
  place = mesh.axis_names.index(MODEL)
  shape = mesh.devices.shape
  devices = mesh.devices.reshape(
    *shape[:place], parts, size // parts, *shape[place + 1 :]
  )
  names = mesh.axis_names
  names = (*names[: place + 1], GROUP, *names[place + 1 :])
  return jax.sharding.Mesh(
    devices, names, axis_types=(AxisType.Auto,) * len(names)
  )


def shard_layer[L: Layer](layer: L) -> L:
  """Shards the batch over "data", KV heads over "model" and pages over both.

  Without a mesh in context (`jax.set_mesh`) nothing happens. An axis that does
  not divide evenly is not sharded.
  """
  return layer.place(functools.partial(_constrain, leading=0))


def shard_stack[L: Layer](stack: L) -> L:
  """Shards a stack of layers, whose leading axis is never sharded."""
  return stack.place(functools.partial(_constrain, leading=1))


def _constrain[Tree](tree: Tree, axes: Sequence[str], leading: int) -> Tree:
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return tree

  def constrain(leaf: jax.Array) -> jax.Array:
    # Outside of programs a constraint would move a host array to the devices.
    stays = is_on_host(leaf) and not isinstance(leaf, jax.core.Tracer)
    # Cursors and counts per row lack the axis of heads; they stay whole.
    if leaf.ndim < 2 + leading or stays:
      return leaf
    spec = PartitionSpec(
      *(None,) * leading,
      *(
        spread_over(axis, [leaf.shape[leading + i]], mesh.shape)
        for i, axis in enumerate(axes)
      ),
    )
    return jax.lax.with_sharding_constraint(leaf, spec)

  return jax.tree.map(constrain, tree)
