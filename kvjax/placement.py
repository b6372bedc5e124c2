"""Where the stored part of a cache lives: with the host, if that is possible.

A host has far more memory than its accelerators. What tokens only look up can
wait there, in the memory kind `pinned_host`; the few rows that a token reads
are gathered by the host and copied to the device, inside the compiled program.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Int, PyTree, Shaped

from kvjax.kernels.stacks import Layer, gather_slots
from kvjax.struct import tree_bytes

DEVICE, HOST = "device", "pinned_host"


@functools.cache
def has_host_memory() -> bool:
  """Whether programs of the default backend can read what the host holds."""
  device = jax.local_devices()[0]
  if HOST not in {memory.kind for memory in device.addressable_memories()}:
    return False
  try:
    jax.jit(_trial).lower().compile()
  except (NotImplementedError, jax.errors.JaxRuntimeError):
    return False
  return True


def _trial() -> Array:
  # Without arguments it fits every mesh that is in context.
  rows = jax.device_put(jnp.zeros((1, 1, 2, 1)), jax.memory.Space.Host)
  gathered: Array = gather_rows(rows, jnp.zeros((1, 1, 1), jnp.int32))
  return gathered


def is_on_host(array: Array | jax.ShapeDtypeStruct) -> bool:
  """Whether an array, which may be traced or a mere shape, lives there."""
  space = jax.typeof(array).memory_space
  return bool(space == jax.memory.Space.Host)


def to_host[Tree](tree: Tree) -> Tree:
  """Moves arrays to the host, where that is possible; in programs or outside.

  They keep their sharding. What is there takes no part in computations, except
  by `gather_rows` and `to_device`.
  """
  if not has_host_memory():
    return tree
  moved: Tree = jax.device_put(tree, jax.memory.Space.Host)
  return moved


def to_device[Tree](tree: Tree) -> Tree:
  """The whole arrays on the device, wherever they live."""

  def moved(array: Array) -> Array:
    # A move, even to where an array is, commits a program to its devices.
    if not is_on_host(array):
      return array
    return jax.device_put(array, jax.memory.Space.Device)

  return jax.tree.map(moved, tree)


def gather_rows(
  rows: PyTree[Shaped[Array, "*L B K F D"]],
  slots: Int[Array, "B K M"],
  layer: Layer = None,
) -> PyTree[Shaped[Array, "B K M D"]]:
  """Copies rows to the device from where they live.

  From the host this is one call for all arrays, which the device need not wait
  for before it needs the rows.

  Args:
    rows: arrays that live together, on the host or on the device.
    slots: which rows of each to copy; -1 for none.
    layer: of stacks of layers, which have one more axis in front, the layer
      to copy from.

  Returns:
    Arrays [B, K, M, D] on the device; zeros for slot -1.
  """
  named = (slots >= 0)[..., None]
  slots = jnp.maximum(slots, 0)
  layer = jnp.zeros((), jnp.int32) if layer is None else layer
  if any(is_on_host(x) for x in jax.tree.leaves(rows)):
    gather = compute_on(
      _gather,
      compute_type="device_host",
      out_memory_spaces=jax.memory.Space.Device,
    )
    where = jax.device_put((slots, layer), jax.memory.Space.Host)
    found = gather(rows, *where)
  else:
    found = _gather(rows, slots, layer)
  return jax.tree.map(
    lambda x: jnp.where(named, x, jnp.zeros((), x.dtype)), found
  )


def _gather(
  rows: PyTree, slots: Int[Array, "B K M"], layer: Int[Array, ""]
) -> PyTree:
  # The host may not see a constant, so that nothing is checked or wrapped.
  def gather(x: Shaped[Array, "*L B K F D"]) -> Shaped[Array, "B K M D"]:
    stack = x if x.ndim > slots.ndim + 1 else x[None]
    return gather_slots(stack, layer, slots)

  return jax.tree.map(gather, rows)


def nbytes_by_memory(tree: PyTree) -> dict[str, int]:
  """Bytes of the arrays of a tree (or of their shapes), by where they live.

  Padding aside; over all devices of a mesh.
  """
  leaves = jax.tree.leaves(tree)
  return {
    DEVICE: tree_bytes([x for x in leaves if not is_on_host(x)]),
    HOST: tree_bytes([x for x in leaves if is_on_host(x)]),
  }
