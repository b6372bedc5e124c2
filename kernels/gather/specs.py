"""Cache compaction at the size of a real model."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.gather.api import compact
from kvjax.kernels.gather.compacted import Compacted
from kvjax.kernels.specs import Choices, Spec

_KV_HEADS, _DIM = 8, 128


def _run(
  keys: Shaped[Array, "B K T D"],
  values: Shaped[Array, "B K T D"],
  positions: Int[Array, "B K T"],
  slots: Int[Array, "B K M"],
  remembered: Float[Array, "B K T"] | None = None,
) -> Compacted:
  return compact(keys, values, positions, remembered, slots)


def _spec(batch: int, tokens: int, kept: int, remembered: bool = False) -> Spec:
  """Gathers random slots of a bfloat16 cache."""
  shape = (batch, _KV_HEADS, tokens)

  def arrays(key: Array) -> tuple[Array, ...]:
    rows = jax.random.split(key, 4)
    keys, values = (
      jax.random.normal(row, (*shape, _DIM), jnp.bfloat16) for row in rows[:2]
    )
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), shape)
    order = jax.random.permutation(
      rows[2], positions, axis=-1, independent=True
    )
    slots = jnp.sort(order[..., :kept], axis=-1)
    more = (jax.random.uniform(rows[3], shape),) if remembered else ()
    return keys, values, positions, slots, *more

  # Every kept row is read and written, and its slot is read.
  row = 2 * _DIM * 2 + 4 * (2 if remembered else 1)
  return Spec(
    name=f"llama-3.1-8b, batch {batch}, {kept:,} of {tokens:,} tokens"
    + (", with attention received" if remembered else ""),
    run=_run,
    arrays=arrays,
    ideal_bytes=math.prod(shape[:2]) * kept * (2 * row + 4),
    platforms=("tpu",),
  )


SPECS = (
  _spec(1, 32768, 8192),
  _spec(1, 131072, 32768),
  _spec(4, 32768, 2048, remembered=True),
)

CHOICES = (
  # With shorter tiles, plans of fewer heads would fit into scalar memory.
  Choices(
    "gather/tpu", {"read": (2048, 4096), "write": (1024, 2048)}, SPECS[1]
  ),
)
