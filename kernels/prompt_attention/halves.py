"""Shares out the queries of prompts so that devices have equal work.

With a causal mask, the last of n devices with consecutive tokens would have
almost twice the mean work. The tokens of each device are therefore split into
two halves, 2n in all: device i attends with the queries of halves i and
2n - 1 - i, which see as many keys together on every device.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.mesh_axes import CONTEXT

# Attends with consecutive queries, given their first token.
Attend = Callable[
  [Float[Array, "B N C D"], Int[Array, ""]], Float[Array, "B N C Dv"]
]


def places(devices: int, odd: int) -> list[tuple[int, int]]:
  """Lists where each device's first (0) or second (1) half is attended to.

  Args:
    devices: n.
    odd: which half.

  Returns:
    Pairs of a device that has a half and the device that attends with it.

  Examples:
    >>> from kvjax.kernels.prompt_attention.halves import places
    >>> places(4, 0), places(4, 1)
    ([(0, 0), (1, 2), (2, 3), (3, 1)], [(0, 1), (1, 3), (2, 2), (3, 0)])
  """
  halves = [2 * device + odd for device in range(devices)]
  return [
    (device, min(half, 2 * devices - 1 - half))
    for device, half in enumerate(halves)
  ]


def attend_in_halves(
  attend: Attend, queries: Float[Array, "B N Q D"]
) -> Float[Array, "B N Q Dv"]:
  """Attends with the queries of all devices along "context", in equal shares.

  Args:
    attend: the attention to all keys.
    queries: this device's queries, inside `jax.shard_map`; an even number.
  """
  size = queries.shape[2] // 2
  devices = jax.lax.axis_size(CONTEXT)
  own = jax.lax.axis_index(CONTEXT)
  sent = [places(devices, odd) for odd in range(2)]
  moved = [
    jax.lax.ppermute(half, CONTEXT, pairs)
    for half, pairs in zip(jnp.split(queries, 2, axis=2), sent, strict=True)
  ]
  # A device with an even number has that half itself of the first halves.
  ends = jnp.stack([own, 2 * devices - 1 - own])
  starts = jnp.where(own % 2 == 0, ends, ends[::-1]) * size
  # A loop, as one program is compiled in half the time of two.
  attended = jax.lax.map(lambda half: attend(*half), (jnp.stack(moved), starts))
  back = [
    jax.lax.ppermute(half, CONTEXT, [(there, here) for here, there in pairs])
    for half, pairs in zip(attended, sent, strict=True)
  ]
  return jnp.concatenate(back, axis=2)
