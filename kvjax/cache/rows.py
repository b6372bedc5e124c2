"""Stored keys and values of a layer, read in place."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.stacks import Layer, index_stack
from kvjax.placement import gather_rows, is_on_host
from kvjax.struct import struct


@struct
class Rows:
  """Keys and values of a layer, possibly in a stack and on the host.

  Only a few of them are read, so the layer is never copied out of its stack.

  Attributes:
    keys: keys of the layer, or of a stack of layers.
    values: values of the layer, or of a stack of layers.
    layer: index of the layer in the stack; None without a stack.
  """

  keys: Float[Array, "*L B K F D"]
  values: Float[Array, "*L B K F Dv"]
  layer: Layer = None

  @property
  def on_host(self) -> bool:
    """Whether they are in host memory."""
    return is_on_host(self.keys)

  def on_device(
    self, slots: Int[Array, "B K J M"]
  ) -> tuple["Rows", Int[Array, "B H M"]]:
    """Brings listed rows to the device.

    Rows that are in host memory are copied, but only those that are listed.

    Args:
      slots: J lists per KV head; -1 for none.

    Returns:
      Rows on the device, and the slots of the lists among them.
    """
    batch, kv_heads, lists, length = slots.shape
    rows = self
    if self.on_host:
      all_slots = slots.reshape(batch, kv_heads, lists * length)
      rows = Rows(*self.gather(all_slots))
      place = jnp.arange(lists * length, dtype=jnp.int32).reshape(lists, length)
      slots = jnp.where(slots >= 0, place[None, None], -1)
    return rows, slots.reshape(batch, kv_heads * lists, length)

  def gather_keys(self, slots: Int[Array, "B K M"]) -> Float[Array, "B K M D"]:
    """Copies keys of some slots to the device; zeros for slot -1."""
    keys: Array = gather_rows(self.keys, slots, self.layer)
    return keys

  def gather(
    self, slots: Int[Array, "B K M"]
  ) -> tuple[Float[Array, "B K M D"], Float[Array, "B K M Dv"]]:
    """Copies keys and values of some slots to the device."""
    rows: tuple[Array, Array] = gather_rows(
      (self.keys, self.values), slots, self.layer
    )
    return rows

  def copy_keys(self) -> Float[Array, "B K F D"]:
    """Returns all keys of the layer, on the device."""
    return self._copy(self.keys)

  def copy(self) -> tuple[Float[Array, "B K F D"], Float[Array, "B K F Dv"]]:
    """Returns all keys and values of the layer, on the device."""
    return self._copy(self.keys), self._copy(self.values)

  def write(
    self,
    keys: Float[Array, "B K M D"],
    values: Float[Array, "B K M Dv"],
    start: Int[Array, ""],
  ) -> "Rows":
    """Replaces the slots of the layer from `start` on."""

    def update(
      x: Shaped[Array, "*L B K F D"], rows: Shaped[Array, "B K M D"]
    ) -> Shaped[Array, "*L B K F D"]:
      zero = jnp.zeros((), jnp.int32)
      where = [zero, zero, start, zero]
      if self.layer is not None:
        where, rows = [self.layer, *where], rows[None]
      return jax.lax.dynamic_update_slice(x, rows, where)

    return Rows(
      update(self.keys, keys), update(self.values, values), self.layer
    )

  def _copy(self, rows: Shaped[Array, "*L B K F D"]) -> Array:
    if self.on_host:
      # Gathered on the host: slicing the stack would copy all of its layers.
      *lead, slots, _ = rows.shape
      all_slots = jnp.arange(slots, dtype=jnp.int32)[None, None]
      all_slots = jnp.broadcast_to(all_slots, (*lead[-2:], slots))
      copied: Array = gather_rows(rows, all_slots, self.layer)
      return copied
    if self.layer is None:
      return rows
    layer: Array = index_stack(rows, self.layer)
    return layer
