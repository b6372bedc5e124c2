"""Reference gather, one head at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.gather.compacted import Compacted


def compact_reference(
  keys: Shaped[Array, "B K T D"],
  values: Shaped[Array, "B K T Dv"],
  positions: Int[Array, "B K T"],
  remembered: Float[Array, "B K T"] | None,
  slots: Int[Array, "B K M"],
) -> Compacted:
  """Computes `kvjax.kernels.gather.compact`."""

  def gather(x: Shaped[Array, "T *D"], head: Int[Array, " M"]) -> Array:
    gathered = x[jnp.maximum(head, 0)]
    is_slot = (head >= 0).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(is_slot, gathered, jnp.zeros((), x.dtype))

  gather_all = jax.vmap(jax.vmap(gather))
  return Compacted(
    gather_all(keys, slots),
    gather_all(values, slots),
    jnp.where(slots >= 0, gather_all(positions, slots), -1),
    None if remembered is None else gather_all(remembered, slots),
  )
