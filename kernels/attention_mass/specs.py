"""Attention mass in Llama-3.1-8B, as methods use it."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.kernels.attention_mass.api import causal_mass, chunk_mass
from kvjax.kernels.specs import Choices, Spec

_HEADS, _KV_HEADS, _DIM = 32, 8, 128


def _causal(name: str, batch: int, queries: int, slots: int) -> Spec:
  def arrays(key: Array) -> tuple[Array, ...]:
    positions = jnp.arange(slots, dtype=jnp.int32)
    return (
      *_draw(key, batch, queries, slots),
      jnp.broadcast_to(positions[-queries:], (batch, queries)),
      jnp.broadcast_to(positions, (batch, _KV_HEADS, slots)),
    )

  position_bytes = 4 * batch * (queries + _KV_HEADS * slots)
  return Spec(
    f"{name} of {batch} x {slots:,}",
    causal_mass,
    arrays,
    _bytes(batch, queries, slots) + position_bytes,
    platforms=("tpu",) if queries == 1 else ("tpu", "gpu"),
  )


def _chunks(chunk: int, batch: int, slots: int) -> Spec:
  def arrays(key: Array) -> tuple[Array, Array, Bool[Array, "B K T"]]:
    valid = jnp.ones((batch, _KV_HEADS, slots), bool)
    return *_draw(key, batch, slots, slots), valid

  return Spec(
    f"chunks of {chunk} of {batch} x {slots:,}",
    functools.partial(chunk_mass, chunk=chunk, scale=1.0),
    arrays,
    _bytes(batch, slots, slots) + batch * _KV_HEADS * slots,
  )


def _draw(
  key: Array, batch: int, queries: int, slots: int
) -> tuple[Float[Array, "B N S D"], Float[Array, "B K T D"]]:
  query_rng, key_rng = jax.random.split(key)
  normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
  return (
    normal(query_rng, (batch, _HEADS, queries, _DIM)),
    normal(key_rng, (batch, _KV_HEADS, slots, _DIM)),
  )


def _bytes(batch: int, queries: int, slots: int) -> int:
  """Counts the bytes of queries, keys and masses."""
  vectors = _HEADS * queries + _KV_HEADS * slots
  return batch * (2 * _DIM * vectors + 4 * _HEADS * slots)


SPECS: tuple[Spec, ...] = (
  _causal("all queries", 1, 32768, 32768),
  _causal("last 64 queries", 1, 64, 131072),
  _causal("last query", 4, 1, 32768),
  _chunks(256, 4, 32768),
)

CHOICES = (
  Choices("attention_mass/gpu", {"blocks": (8, 16, 32)}, SPECS[1]),
  Choices(
    "attention_mass/tpu",
    # Longer tiles do not fit into VMEM together with the masses.
    {"rows": (512, 1024), "slots": (512, 1024)},
    SPECS[0],
  ),
)
