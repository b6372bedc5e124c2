"""Placement of the stored part of a cache in host memory.

A host has far more memory than its accelerators. Stored keys and values can
stay there, in the memory kind `pinned_host`. Inside the compiled program, the
host ranks some of them by a token's queries and attends to the few that the
token reads; see `kvjax.kernels.host_memory`. Where the device needs rows
themselves, the host gathers them.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree, Shaped

from kvjax.kernels.host_memory import is_on_host as is_on_host
from kvjax.kernels.host_memory import run_on_host
from kvjax.kernels.stacks import Layer, gather_slots
from kvjax.struct import tree_bytes

DEVICE, HOST = "device", "pinned_host"


@functools.cache
def has_host_memory() -> bool:
  """Whether programs of the default backend can read host memory."""
  device = jax.local_devices()[0]
  if HOST not in {memory.kind for memory in device.addressable_memories()}:
    return False
  try:
    # A backend may list the memory and not compile programs that read it.
    jax.jit(_trial).lower().compile()
  except (NotImplementedError, jax.errors.JaxRuntimeError):
    return False
  return True


def _trial() -> Array:
  # Without arguments, so that it works with any mesh in context.
  rows = jax.device_put(jnp.zeros((1, 1, 2, 1)), jax.memory.Space.Host)
  gathered: Array = gather_rows(rows, jnp.zeros((1, 1, 1), jnp.int32))
  return gathered


def to_host[Tree](tree: Tree) -> Tree:
  """Moves arrays to the host if possible, inside or outside of programs.

  They keep their sharding. Only `kvjax.kernels.host_memory.run_on_host`, and
  functions that call it, can read them there.
  """
  if not has_host_memory():
    return tree
  moved: Tree = jax.device_put(tree, jax.memory.Space.Host)
  return moved


def gather_rows(
  rows: PyTree[Shaped[Array, "*L B K F D"]],
  slots: Int[Array, "B K M"],
  layer: Layer = None,
) -> PyTree[Shaped[Array, "B K M D"]]:
  """Gathers rows and copies them to the device.

  From host memory this is one call for all arrays, which runs concurrently with
  the device until the rows are needed.

  Args:
    rows: arrays, all on the host or all on the device.
    slots: rows of each array to copy; -1 for none.
    layer: for stacks of layers, with an additional leading axis, the layer to
      copy from.

  Returns:
    Arrays [B, K, M, D] on the device; zeros for slot -1.
  """
  mask = (slots >= 0)[..., None]
  # The gather does not check bounds.
  slots = jnp.maximum(slots, 0)
  # Made here, because a function on the host must not create arrays.
  layer = jnp.zeros((), jnp.int32) if layer is None else layer
  if any(is_on_host(x) for x in jax.tree.leaves(rows)):
    gathered = run_on_host(_gather, rows, slots, layer)
  else:
    gathered = _gather(rows, slots, layer)
  return jax.tree.map(
    lambda x: jnp.where(mask, x, jnp.zeros((), x.dtype)), gathered
  )


def _gather(
  rows: PyTree, slots: Int[Array, "B K M"], layer: Int[Array, ""]
) -> PyTree:
  def gather(x: Shaped[Array, "*L B K F D"]) -> Shaped[Array, "B K M D"]:
    stack = x if x.ndim > slots.ndim + 1 else x[None]
    return gather_slots(stack, layer, slots)

  return jax.tree.map(gather, rows)


def nbytes_by_memory(tree: PyTree) -> dict[str, int]:
  """Bytes of the arrays of a tree (or of their shapes) by kind of memory.

  They are without padding and summed over all devices of a mesh.
  """
  leaves = jax.tree.leaves(tree)
  return {
    DEVICE: tree_bytes([x for x in leaves if not is_on_host(x)]),
    HOST: tree_bytes([x for x in leaves if is_on_host(x)]),
  }
