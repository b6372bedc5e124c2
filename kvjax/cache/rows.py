"""Stored keys and values of a layer, read where they are."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.stacks import Layer, index_stack
from kvjax.placement import gather_rows, is_on_host
from kvjax.struct import struct


@struct
class Rows:
  """Keys and values of a layer, which may stand in a stack, with the host.

  They are many and few are read, so that no layer is copied out of its stack.

  Attributes:
    keys: of the layer, or of a stack of layers.
    values: likewise.
    layer: which layer of the stack is meant; None where there is no stack.
  """

  keys: Float[Array, "*L B K F D"]
  values: Float[Array, "*L B K F Dv"]
  layer: Layer = None

  @property
  def on_host(self) -> bool:
    """Whether the host holds them."""
    return is_on_host(self.keys)

  def on_device(
    self, slots: Int[Array, "B K J M"]
  ) -> tuple["Rows", Int[Array, "B H M"]]:
    """Rows on the device and, among them, the slots of J lists per KV head.

    The host's rows come over: those that are listed, and no others.
    """
    batch, kv_heads, lists, most = slots.shape
    rows = self
    if self.on_host:
      every = slots.reshape(batch, kv_heads, lists * most)
      rows = Rows(*self.gather(every))
      place = jnp.arange(lists * most, dtype=jnp.int32).reshape(lists, most)
      slots = jnp.where(slots >= 0, place[None, None], -1)
    return rows, slots.reshape(batch, kv_heads * lists, most)

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
    """All keys of the layer, on the device."""
    return self._copy(self.keys)

  def copy(self) -> tuple[Float[Array, "B K F D"], Float[Array, "B K F Dv"]]:
    """All keys and values of the layer, on the device."""
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
      # The host gathers: a slice of a stack would bring all layers over.
      *lead, slots, _ = rows.shape
      every = jnp.arange(slots, dtype=jnp.int32)[None, None]
      every = jnp.broadcast_to(every, (*lead[-2:], slots))
      copied: Array = gather_rows(rows, every, self.layer)
      return copied
    if self.layer is None:
      return rows
    layer: Array = index_stack(rows, self.layer)
    return layer
