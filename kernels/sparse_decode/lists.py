"""Lists of slots, cut into chunks for the kernels."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.quantized import Quantized


class Lists(NamedTuple):
  """Lists in C chunks of c entries, the last padded with entries for nothing.

  Attributes:
    counts: entries of each list up to the last that names a slot.
    numbers: slots to fetch; some slot for nothing.
    slots: the same; -1 for nothing.
    bias: added to the logits of the query heads of a list.
    key_scales: of the listed keys, if they are quantized.
    value_scales: of the listed values, likewise.
  """

  counts: Int[Array, "B H"]
  numbers: Int[Array, "B H C 1 c"]
  slots: Int[Array, "B H C 1 c"]
  bias: Float[Array, "B H C G c"] | None
  key_scales: Float[Array, "B H C 1 c"] | None
  value_scales: Float[Array, "B H C 1 c"] | None

  @classmethod
  def of(
    cls,
    keys: Float[Array, "L B K T D"] | Quantized,
    values: Float[Array, "L B K T D"] | Quantized,
    layer: Int[Array, ""],
    slots: Int[Array, "B H M"],
    bias: Float[Array, "B N M"] | None,
    chunk: int,
    chunks: int,
  ) -> "Lists":
    """Cuts lists.

    Args:
      keys: to which they belong.
      values: likewise.
      layer: of both, which is meant.
      slots: the lists.
      bias: of their entries.
      chunk: c.
      chunks: C, enough for all entries.
    """
    batch, lists, most = slots.shape

    def cut(
      x: Shaped[Array, "B A M"], fill: float = 0
    ) -> Shaped[Array, "B H C G c"]:
      wide = ((0, 0), (0, 0), (0, chunks * chunk - most))
      x = jnp.pad(x, wide, constant_values=fill)
      return jnp.swapaxes(x.reshape(batch, lists, -1, chunks, chunk), 2, 3)

    def scales(
      x: Float[Array, "L B K T D"] | Quantized,
    ) -> Float[Array, "B H C 1 c"] | None:
      if not isinstance(x, Quantized):
        return None
      rows, kv_heads, length = x.shape[1:4]
      first = jnp.arange(rows * kv_heads, dtype=jnp.int32) * length
      first = first + layer * (rows * kv_heads * length)
      index = jnp.clip(slots, 0, length - 1).reshape(rows * kv_heads, -1)
      index = (index + first[:, None]).reshape(slots.shape)
      # Compilers leave one long vector where it is.
      return cut(x.scale.reshape(-1)[index].astype(jnp.float32))

    numbers = jnp.arange(1, most + 1, dtype=jnp.int32)
    named = jnp.where(slots >= 0, numbers[None, None], 0)
    return cls(
      jnp.max(named, axis=-1, initial=0),
      cut(jnp.clip(slots, 0, keys.shape[3] - 1)),
      cut(slots, -1),
      None if bias is None else cut(bias.astype(jnp.float32)),
      scales(keys),
      scales(values),
    )
