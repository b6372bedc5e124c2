"""Sharding of prompts and caches over a mesh; see `kernels.mesh_axes`."""

import functools
import math
import re
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import PyTree

from kvjax.activations import Activations
from kvjax.cache.base import AXES, Layer
from kvjax.errors import InputError
from kvjax.kernels.mesh_axes import (
  CONTEXT,
  DATA,
  GROUP,
  HEADS,
  MODEL,
  Spread,
  axis_size,
  spread_over,
  whole,
)
from kvjax.placement import is_on_host

# Those that a flag may give, in the order of a mesh's devices.
MESH_AXES = (DATA, CONTEXT, MODEL)
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
    if axis not in MESH_AXES or not _SIZE.fullmatch(size):
      raise InputError(
        "A mesh is written as data:2,model:2, or with context:2 too; "
        f"{part[:_SHOWN]!r} does not fit."
      )
    if axis in given:
      raise InputError(
        f"The mesh {text[:_SHOWN]} has the axis {axis!r} twice; give it once."
      )
    given[axis] = int(size)
  return {axis: given.get(axis, 1) for axis in MESH_AXES}


def parse_mesh(text: str) -> jax.sharding.Mesh:
  """Makes the mesh that a flag such as `data:2,model:2` describes.

  It has devices of this host, or those of all hosts, which then run the same
  programs; see `kvjax.hosts`.

  Raises:
    InputError: see `parse_sizes`, or more devices than this host has, and not
      as many as all hosts.
  """
  sizes = parse_sizes(text)
  count = math.prod(sizes.values())
  # A mesh of some hosts would leave the others without work.
  total = jax.device_count()
  devices = jax.devices() if count == total else jax.local_devices()
  if count > len(devices):
    found = f"there are {total}"
    if jax.process_count() > 1:
      found = f"a host has {len(devices)}, and all hosts have {total}"
    raise InputError(f"The mesh {text} needs {count} devices; {found}.")
  shape = mesh_shape(sizes)
  return jax.make_mesh(
    tuple(shape.values()),
    tuple(shape),
    axis_types=(AxisType.Auto,) * len(shape),
    devices=devices[:count],
  )


def mesh_shape(sizes: Mapping[str, int]) -> dict[str, int]:
  """Sizes of the axes that a mesh has: "context" only with several devices.

  Args:
    sizes: sizes of all axes of `MESH_AXES`.
  """
  return {
    axis: sizes[axis]
    for axis in MESH_AXES
    if axis != CONTEXT or sizes[axis] > 1
  }


def split_mesh(mesh: jax.sharding.Mesh, kv_heads: int) -> jax.sharding.Mesh:
  """Splits the axis "model" of a mesh so that KV heads divide evenly.

  The new "model" has as many devices as divide both the old one and the number
  of KV heads; the rest become the axis "group", whose devices have the same KV
  heads. Query heads, MLP, vocabulary and pages, which have the slots of heads,
  are still shared out over all.

  Args:
    mesh: a mesh with an axis "model".
    kv_heads: number of KV heads of a layer.

  Returns:
    The mesh with one more axis; the same one if the axis divides the KV heads.

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


def check_mesh(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> None:
  """Refuses a mesh on which arrays would not be sharded as documented.

  Raises:
    InputError: the axes "data" and "model" are missing, or the type of an axis
      is `AxisType.Explicit`, as `jax.make_mesh` makes it by default.
  """
  names = set(mesh.axis_names)
  explicit = AxisType.Explicit in mesh.axis_types
  if names and (explicit or not {DATA, MODEL} <= names):
    axes = ", ".join(
      f"{name}: {type.name}"
      for name, type in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )
    raise InputError(
      "A mesh needs the axes 'data' and 'model', and axes of type Auto, as "
      "kvjax.cache.sharding.parse_mesh('data:2,model:4') makes it; this one "
      f"has {axes}."
    )


def context_size() -> int:
  """Devices that share out the tokens of a prompt, on the mesh in context."""
  return int(jax.sharding.get_abstract_mesh().shape.get(CONTEXT, 1))


def heads_fill_mesh(kv_heads: int) -> bool:
  """Whether all devices for a row can have KV heads of their own."""
  sizes = jax.sharding.get_abstract_mesh().shape
  return spread_over(MODEL, [kv_heads], sizes) == whole(MODEL, sizes)


def shard_tokens[Tree: PyTree](tree: Tree, shape: tuple[int, ...]) -> Tree:
  """Shards arrays of a prompt's tokens over "data" and "context".

  Args:
    tree: arrays; those [B, S, ...] are sharded.
    shape: B and S.
  """
  if context_size() == 1:
    return tree

  def shard(leaf: jax.Array) -> jax.Array:
    # Numbers of tokens are small; all devices have them.
    own = leaf.ndim > 2 and leaf.shape[:2] == shape
    return _constrain_axes(leaf, (DATA, CONTEXT)) if own else leaf

  return jax.tree.map(shard, tree)


def residual_axes(shape: tuple[int, ...]) -> Spread:
  """Chooses the mesh axes that share out the tokens of the residual of prompts.

  Norms and sums of a token need no other token. What devices send does not
  grow: a sum of which each keeps its tokens, and `gather_residual`, are the two
  halves of a sum for all devices (Korthikanti et al., arXiv 2205.05198). Of
  several rows, XLA would make the whole sum all the same on TPUs, where large
  ones therefore run row by row; see `kvjax.engine.by_row`.

  Args:
    shape: shape of the residual [B, S, E].

  Returns:
    None if every device has all tokens, or "context" shares them out.
  """
  sizes = jax.sharding.get_abstract_mesh().shape
  if context_size() > 1 or shape[0] != sizes.get(DATA, 1):
    return None
  axes = spread_over(MODEL, [shape[1]], sizes)
  return axes if axis_size(axes, sizes) > 1 else None


def shard_residual(hidden: jax.Array) -> jax.Array:
  """Shards the residual [B, S, E] of prompts between the parts of a layer."""
  axes = residual_axes(hidden.shape)
  if axes is None:
    return shard_tokens(hidden, hidden.shape[:2])
  return jax.lax.with_sharding_constraint(hidden, PartitionSpec(DATA, axes))


def gather_residual(hidden: jax.Array) -> jax.Array:
  """Gathers what `shard_residual` has shared out, for products with weights."""
  if residual_axes(hidden.shape) is None:
    return hidden
  return _constrain_axes(hidden, (DATA,))


def shard_activations(activations: Activations) -> Activations:
  """Shards the activations of prompts: their tokens over "context", too."""
  if context_size() == 1:
    return activations
  shape = activations.positions.shape

  def shard(leaf: jax.Array) -> jax.Array:
    if leaf.ndim == 4 and (leaf.shape[0], leaf.shape[2]) == shape:
      return _constrain_axes(leaf, (DATA, HEADS, CONTEXT))
    return _constrain_axes(leaf, (DATA,)) if leaf.shape == shape else leaf

  return shard_tokens(jax.tree.map(shard, activations), shape)


def replicate(arrays: PyTree) -> PyTree:
  """Copies arrays to the device, or all of them to each device of the mesh.

  Programs that take them for every layer do not copy them every time then.
  """
  if not jax.tree.leaves(arrays):
    return arrays
  if jax.sharding.get_abstract_mesh().empty:
    return jax.tree.map(jnp.asarray, arrays)
  return _replicate(arrays)


@jax.jit
def _replicate(arrays: PyTree) -> PyTree:
  return jax.lax.with_sharding_constraint(arrays, PartitionSpec())


def gather_tokens[Tree: PyTree](scores: Tree) -> Tree:
  """Gathers the scores of each head's tokens, which then select on one device.

  Args:
    scores: arrays [B, K, T] or the like.
  """
  if context_size() == 1:
    return scores

  # Two constraints: with the last one alone, keys would move, not scores.
  def split(leaf: jax.Array) -> jax.Array:
    return _constrain_axes(leaf, (DATA, HEADS, CONTEXT))

  return _constrain(jax.tree.map(split, scores), AXES, leading=0)


def _constrain_axes(x: jax.Array, axes: Sequence[str]) -> jax.Array:
  """Shards leading axes over one mesh axis each, where it divides them."""
  sizes = jax.sharding.get_abstract_mesh().shape
  spec = (
    spread_over(axis, [length], sizes)
    for axis, length in zip(axes, x.shape, strict=False)
  )
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def shard_layer[L: Layer](layer: L) -> L:
  """Shards the batch over "data", and KV heads or pages over "model".

  The devices of "context" count as further ones of "model". Without a mesh in
  context (`jax.set_mesh`) nothing happens. An axis that does not divide evenly
  is not sharded.
  """
  return layer.place(functools.partial(_constrain, leading=0))


def shard_stack[L: Layer](stack: L) -> L:
  """Shards a stack of layers, whose leading axis is never sharded."""
  return stack.place(functools.partial(_constrain, leading=1))


def put_stack[L: Layer](stack: L) -> L:
  """Shards a stack of layers that nothing else refers to, outside of programs.

  Arrays that are where they belong are not copied: the new stack shares them.
  """
  return stack.place(_put)


def _put[Tree](tree: Tree, axes: Sequence[str]) -> Tree:
  if jax.sharding.get_abstract_mesh().empty:
    return tree

  def put(leaf: jax.Array) -> jax.Array:
    spec = layer_spec(leaf.shape, axes, leading=1)
    stays = spec is None or is_on_host(leaf)
    return leaf if stays else jax.device_put(leaf, spec)

  return jax.tree.map(put, tree)


def layer_spec(
  shape: Sequence[int], axes: Sequence[str], leading: int = 0
) -> PartitionSpec | None:
  """Chooses how an array of a layer is spread over the mesh in context.

  Args:
    shape: its shape.
    axes: mesh axes of its axes after the leading ones.
    leading: leading axes that are not sharded: 1 for a stack of layers.

  Returns:
    None if it stays whole: cursors and counts per row lack the axis of heads.
  """
  if len(shape) < 2 + leading:
    return None
  sizes = jax.sharding.get_abstract_mesh().shape
  return PartitionSpec(
    *(None,) * leading,
    *(
      spread_over(axis, [shape[leading + i]], sizes)
      for i, axis in enumerate(axes)
    ),
  )


def _constrain[Tree](tree: Tree, axes: Sequence[str], leading: int) -> Tree:
  if jax.sharding.get_abstract_mesh().empty:
    return tree

  def constrain(leaf: jax.Array) -> jax.Array:
    # Outside of programs a constraint would move a host array to the devices.
    stays = is_on_host(leaf) and not isinstance(leaf, jax.core.Tracer)
    spec = layer_spec(leaf.shape, axes, leading)
    if spec is None or stays:
      return leaf
    return jax.lax.with_sharding_constraint(leaf, spec)

  return jax.tree.map(constrain, tree)
