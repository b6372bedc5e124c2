"""Copies of listed slots by XLA's gathers, one for each array."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.gather.compacted import Compacted


def compact_xla(
  keys: Shaped[Array, "B K T D"],
  values: Shaped[Array, "B K T Dv"],
  positions: Int[Array, "B K T"],
  received: Float[Array, "B K T"] | None,
  slots: Int[Array, "B K M"],
) -> Compacted:
  """See `kvjax.kernels.gather.compact`."""

  def listed(
    x: Shaped[Array, "B K T *D"], none: int = 0
  ) -> Shaped[Array, "B K M *D"]:
    return jnp.take_along_axis(
      x,
      slots.reshape(*slots.shape, *[1] * (x.ndim - 3)),
      axis=2,
      # -1 is out of bounds, and such a slot is filled.
      mode="fill",
      fill_value=none,
      wrap_negative_indices=False,
    )

  return Compacted(
    listed(keys),
    listed(values),
    listed(positions, -1),
    None if received is None else listed(received),
  )
