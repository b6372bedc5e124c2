"""Selection in Llama-3.1-8B, for eviction and for retrieval."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.select.api import largest, mask_to_slots
from kvjax.kernels.specs import Choices, Spec

_KV_HEADS = 8


def _largest(use: str, batch: int, slots: int, size: int) -> Spec:
  def arrays(key: Array) -> tuple[Float[Array, "B K T"], Int[Array, "B K"]]:
    scores = jax.random.normal(key, (batch, _KV_HEADS, slots))
    return scores, jnp.full((batch, _KV_HEADS), size, jnp.int32)

  return Spec(
    f"{use}: {size:,} of {batch} x {slots:,}",
    functools.partial(largest, size=size),
    arrays,
    4 * batch * _KV_HEADS * (slots + 1 + size),
    library=functools.partial(_sorted_top_k, size=size),
  )


def _sorted_top_k(
  scores: Float[Array, "B K T"], counts: Int[Array, "B K"], size: int
) -> Int[Array, "B K M"]:
  del counts  # all of them are `size`
  return jnp.sort(jax.lax.top_k(scores, size)[1], axis=-1)


def _true(batch: int, slots: int, size: int) -> Spec:
  def arrays(key: Array) -> tuple[Bool[Array, "B K T"]]:
    share = size / slots
    return (jax.random.bernoulli(key, share, (batch, _KV_HEADS, slots)),)

  return Spec(
    f"mask to slots: {size:,} of {batch} x {slots:,}",
    functools.partial(mask_to_slots, size=size),
    arrays,
    batch * _KV_HEADS * (slots + 4 * size),
  )


SPECS: tuple[Spec, ...] = (
  _largest("keep", 1, 32_768, 8_192),
  _largest("keep", 4, 32_768, 8_192),
  _largest("keep", 1, 131_072, 32_768),
  _largest("retrieve", 4, 131_072, 2_048),
  _true(1, 131_072, 32_768),
)

CHOICES = (
  Choices("select/gpu", {"step": (1024, 2048, 4096)}, SPECS[1]),
  Choices("select/tpu", {"unroll": (4, 8, 16)}, SPECS[1]),
)
