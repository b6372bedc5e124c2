"""Prompt attention in Llama-3.1-8B."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.kernels.prompt_attention.api import prompt_attention
from kvjax.kernels.specs import Choices, Spec

_HEADS, _KV_HEADS, _DIM = 32, 8, 128


def _prompts(batch: int, tokens: int) -> Spec:
  def arrays(key: Array) -> tuple[Array, ...]:
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    rngs = jax.random.split(key, 3)
    positions = jnp.arange(tokens, dtype=jnp.int32)
    return (
      normal(rngs[0], (batch, _HEADS, tokens, _DIM)),
      normal(rngs[1], (batch, _KV_HEADS, tokens, _DIM)),
      normal(rngs[2], (batch, _KV_HEADS, tokens, _DIM)),
      jnp.broadcast_to(positions, (batch, tokens)),
    )

  # Queries and outputs, keys and values, positions.
  vectors = 2 * (_HEADS + _KV_HEADS)
  return Spec(
    f"{batch} x {tokens:,} tokens",
    prompt_attention,
    arrays,
    batch * tokens * (2 * _DIM * vectors + 4),
  )


SPECS: tuple[Spec, ...] = (_prompts(1, 32768), _prompts(1, 131072))

CHOICES = (
  # With shorter blocks, fewer tokens would have a kernel.
  Choices("prompt_attention/tpu", {"block": (512, 1024)}, SPECS[0]),
)
