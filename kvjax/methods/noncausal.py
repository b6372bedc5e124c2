"""Scores by attention without a causal mask inside chunks of the prompt."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.heads import by_kv_head
from kvjax.kernels.attention import AttentionOptions
from kvjax.kernels.attention_mass import chunk_mass
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
  options: AttentionOptions,
  scale: Scale,
  value_norm: ValueNorm,
  width: int,
) -> Float[Array, "B K T"]:
  """Computes the attention that each key receives from its chunk's queries.

  It is the column sum of softmax(scale q.k), mean over the group, times the
  norm of the value, averaged over `width` neighbors with zeros beyond the ends.

  Source: Chari and Van Durme, arXiv 2507.08143, Section 3.

  Args:
    queries: rotated queries, one for every key.
    keys: rotated keys.
    values: float32 values, zero in empty slots.
    valid: slots whose queries and keys count; the others are arbitrary.
    chunk: C, tokens per chunk; the last one may be shorter.
    options: of the layer, of which only the scale counts: chunks have their own
      softmax, without softcap and sinks.
    scale: of the logits: 1, or that of the layer, which is 1 / sqrt(D) in most
      models.
    value_norm: "l2", "l1", or "none".
    width: odd width of the average; 1 for none.
  """
  factor = 1.0 if scale == "one" else options.scale_of(queries.shape[-1])
  mass = chunk_mass(queries, keys, valid, chunk, factor)
  scores = jnp.mean(by_kv_head(mass, keys.shape[1]), axis=2)
  if value_norm != "none":
    order = 2 if value_norm == "l2" else 1
    scores = scores * jnp.linalg.norm(values, ord=order, axis=-1)
  return pool(scores, valid, width, "avg")
