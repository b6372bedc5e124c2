"""Attention without a causal mask inside chunks of the prompt, as a score."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.kernels.attention_mass import chunk_mass
from kvjax.methods.heads import by_kv_head
from kvjax.methods.snapkv import pool

Scale = Literal["one", "rsqrt_d"]
ValueNorm = Literal["l2", "l1", "none"]


def noncausal_attention(
  queries: Float[Array, "B N T D"],
  keys: Float[Array, "B K T D"],
  values: Float[Array, "B K T Dv"],
  valid: Bool[Array, "B K T"],
  *,
  chunk: int,
  scale: Scale,
  value_norm: ValueNorm,
  width: int,
) -> Float[Array, "B K T"]:
  """Attention that a key receives from all queries of its own chunk.

  Column sums of softmax(scale q.k), group mean, times the norm of the value,
  averaged over `width` neighbors with zeros beyond the ends.

  Source: Chari and Van Durme, arXiv 2507.08143, Section 3.

  Args:
    queries: rotated queries, one for every key.
    keys: rotated keys.
    values: float32, zero where nothing is held.
    valid: slots that ask and receive; other queries and keys may hold anything.
    chunk: C, tokens per chunk; the last one may be shorter.
    scale: of the logits: 1, or 1 / sqrt(D).
    value_norm: "l2", "l1", or "none".
    width: odd; 1 averages nothing.
  """
  factor = 1.0 if scale == "one" else queries.shape[-1] ** -0.5
  mass = chunk_mass(queries, keys, valid, chunk, factor)
  scores = jnp.mean(by_kv_head(mass, keys.shape[1]), axis=2)
  if value_norm != "none":
    order = 2 if value_norm == "l2" else 1
    scores = scores * jnp.linalg.norm(values, ord=order, axis=-1)
  return pool(scores, valid, width, "avg")
