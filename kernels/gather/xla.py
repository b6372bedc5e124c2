"""Gathers listed slots by XLA's gather, one array at a time."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.gather.compacted import Compacted


def compact_xla(
  keys: Shaped[Array, "B K T D"],
  values: Shaped[Array, "B K T Dv"],
  positions: Int[Array, "B K T"],
  remembered: Float[Array, "B K T"] | None,
  slots: Int[Array, "B K M"],
) -> Compacted:
  """Computes `kvjax.kernels.gather.compact`."""

  def gather(
    x: Shaped[Array, "B K T *D"], fill: int = 0
  ) -> Shaped[Array, "B K M *D"]:
    return jnp.take_along_axis(
      x,
      slots.reshape(*slots.shape, *[1] * (x.ndim - 3)),
      axis=2,
      # With wrapping off, -1 is out of bounds and gets the fill value.
      mode="fill",
      fill_value=fill,
      wrap_negative_indices=False,
    )

  return Compacted(
    gather(keys),
    gather(values),
    gather(positions, -1),
    None if remembered is None else gather(remembered),
  )
