"""Lists of slots, split into chunks for the kernel."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.quantized import Quantized


class Lists(NamedTuple):
  """Lists in C chunks of c entries, the last of which is padded.

  Attributes:
    counts: entries of each list up to the last slot.
    slots: slots to attend to; -1 for none.
    bias: added to the logits of the query heads of a list.
    key_scales: scales of the listed keys, if they are quantized.
    value_scales: scales of the listed values, if they are quantized.
  """

  counts: Int[Array, "B H"]
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
    """Splits lists into chunks.

    Args:
      keys: the keys.
      values: the values.
      layer: index of the layer in both.
      slots: the lists.
      bias: bias of their entries.
      chunk: c.
      chunks: C, enough for all entries.
    """
    batch, lists, length = slots.shape

    def to_chunks(
      x: Shaped[Array, "B A M"], fill: float = 0
    ) -> Shaped[Array, "B H C G c"]:
      padding = ((0, 0), (0, 0), (0, chunks * chunk - length))
      x = jnp.pad(x, padding, constant_values=fill)
      return jnp.swapaxes(x.reshape(batch, lists, -1, chunks, chunk), 2, 3)

    def scales(
      x: Float[Array, "L B K T D"] | Quantized,
    ) -> Float[Array, "B H C 1 c"] | None:
      if not isinstance(x, Quantized):
        return None
      rows, kv_heads, length = x.shape[1:4]
      first = jnp.arange(rows * kv_heads, dtype=jnp.int32) * length
      first = first + layer * (rows * kv_heads * length)
      # Lists of one KV head are adjacent: [B, H, M] is [B K, (H / K) M].
      index = jnp.clip(slots, 0, length - 1).reshape(rows * kv_heads, -1)
      index = (index + first[:, None]).reshape(slots.shape)
      # XLA gathers from one flat vector without copying it.
      return to_chunks(x.scale.reshape(-1)[index].astype(jnp.float32))

    # From 1, so that the maximum is a count, 0 for a list without slots.
    numbers = jnp.arange(1, length + 1, dtype=jnp.int32)
    named = jnp.where(slots >= 0, numbers[None, None], 0)
    return cls(
      jnp.max(named, axis=-1, initial=0),
      to_chunks(slots, -1),
      None if bias is None else to_chunks(bias.astype(jnp.float32)),
      scales(keys),
      scales(values),
    )
