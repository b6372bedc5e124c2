"""Copies of listed slots, one head at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.gather.compacted import Compacted


def compact_reference(
  keys: Shaped[Array, "B K T D"],
  values: Shaped[Array, "B K T Dv"],
  positions: Int[Array, "B K T"],
  received: Float[Array, "B K T"] | None,
  slots: Int[Array, "B K M"],
) -> Compacted:
  """See `kvjax.kernels.gather.compact`."""

  def listed(x: Shaped[Array, "T *D"], head: Int[Array, " M"]) -> Array:
    found = x[jnp.maximum(head, 0)]
    named = (head >= 0).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(named, found, jnp.zeros((), x.dtype))

  every = jax.vmap(jax.vmap(listed))
  return Compacted(
    every(keys, slots),
    every(values, slots),
    jnp.where(slots >= 0, every(positions, slots), -1),
    None if received is None else every(received, slots),
  )
