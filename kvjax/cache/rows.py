"""Stored keys and values of a layer, read in place."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.dispatch import target_platform
from kvjax.kernels.host_memory import is_on_host, run_on_host
from kvjax.kernels.stacks import Layer, as_stack, gather_slots, index_stack
from kvjax.placement import gather_rows
from kvjax.retrieval.weights import scaled_logits
from kvjax.struct import struct

# Keys of a list that are multiplied at once.
_TILE = 256


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

  def logits(
    self, slots: Int[Array, "B K U"], queries: Float[Array, "B K G D"]
  ) -> Float[Array, "B K G U"]:
    """Computes products of queries and listed keys, times D^-1/2.

    Keys that are in host memory stay there: the host multiplies. Elsewhere,
    keys are read up to the last slot that any list has, a tile at a time.

    Args:
      slots: slots of the keys; -1 for none, whose logits are -inf.
      queries: float32 queries.
    """
    keys, layer = as_stack(self.keys, self.layer)
    # The gather does not check bounds, so -1 reads slot 0 and is masked below.
    operands = keys, layer, jnp.maximum(slots, 0), queries
    if self.on_host:
      products: Array = run_on_host(_products, *operands)
    # With a loop, the host would have to read its condition on a GPU.
    elif slots.shape[-1] <= _TILE or target_platform() == "gpu":
      products = _products(*operands)
    else:
      places = jnp.arange(1, slots.shape[-1] + 1, dtype=jnp.int32)
      last = jnp.max(jnp.where(slots >= 0, places, 0))
      products = _products_in_tiles(*operands, last)
    return jnp.where(slots[:, :, None] >= 0, products, -jnp.inf)

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

    # Never on the host: a method with a ring, which alone writes, refuses it.
    return Rows(
      update(self.keys, keys), update(self.values, values), self.layer
    )

  def _copy(
    self, rows: Shaped[Array, "*L B K F D"]
  ) -> Shaped[Array, "B K F D"]:
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


def _products(
  keys: Float[Array, "L B K F D"],
  layer: Int[Array, ""],
  slots: Int[Array, "B K U"],
  queries: Float[Array, "B K G D"],
) -> Float[Array, "B K G U"]:
  """Products of queries and keys of listed slots, times D^-1/2."""
  listed = gather_slots(keys, layer, slots).astype(jnp.float32)
  # Keys come first, which takes half as long: XLA need not transpose them.
  products = scaled_logits(listed, queries)
  return jnp.swapaxes(products, -1, -2)


def _products_in_tiles(
  keys: Float[Array, "L B K F D"],
  layer: Int[Array, ""],
  slots: Int[Array, "B K U"],
  queries: Float[Array, "B K G D"],
  last: Int[Array, ""],
) -> Float[Array, "B K G U"]:
  """Products of the first `last` listed slots; zeros for tiles after them.

  A tile of keys is small enough to be multiplied before it leaves the cache of
  a processor. Lists of neighboring queries overlap: CTkvr's paper finds that at
  most half of the recalled keys are different ones, so that about half of the
  places are empty.
  """
  count = slots.shape[-1]
  padding = -count % _TILE
  padded = jnp.pad(slots, ((0, 0), (0, 0), (0, padding)))
  none = jnp.zeros((*queries.shape[:-1], _TILE), jnp.float32)

  def one_tile(
    _: None, start: Int[Array, ""]
  ) -> tuple[None, Float[Array, "B K G C"]]:
    tile = jax.lax.dynamic_slice_in_dim(padded, start, _TILE, axis=2)
    return None, jax.lax.cond(
      start < last, lambda: _products(keys, layer, tile, queries), lambda: none
    )

  # Not a loop up to `last`, which has no gradient.
  starts = jnp.arange(0, count, _TILE, dtype=jnp.int32)
  _, products = jax.lax.scan(one_tile, None, starts)
  products = jnp.moveaxis(products, 0, 3)
  return products.reshape(*none.shape[:-1], -1)[..., :count]
