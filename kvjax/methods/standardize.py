"""Scores brought to zero mean and unit variance."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Scope = Literal["head", "layer", "chunk"]


def standardized(
  scores: Float[Array, "B K T"],
  where: Bool[Array, "B K T"],
  scope: Scope,
  chunk: int = 0,
  start: int = 0,
) -> Float[Array, "B K T"]:
  """Scores of zero mean and unit variance; constant scores become 0.

  Args:
    scores: float32.
    where: slots that count; the others get 0.
    scope: what a row standardizes together: each "head", all heads of the
      "layer", or all heads of each "chunk" of slots.
    chunk: slots per chunk, the last of which may be shorter; 0 is all.
    start: slot at which the first chunk begins; none before it counts.
  """
  if scope == "head":
    return _standardized(scores, where, -1)
  if scope == "layer" or chunk == 0:
    return _standardized(scores, where, (1, 2))
  batch, heads, slots = scores.shape
  before = -start % chunk
  wide = ((0, 0), (0, 0), (before, -(before + slots) % chunk))

  def chunks(x: Array) -> Array:
    return jnp.pad(x, wide).reshape(batch, heads, -1, chunk)

  z = _standardized(chunks(scores), chunks(where), (1, 3))
  return z.reshape(batch, heads, -1)[..., before : before + slots]


def _standardized(
  scores: Float[Array, "*A"],
  where: Bool[Array, "*A"],
  axes: int | tuple[int, ...],
) -> Float[Array, "*A"]:
  def mean(x: Float[Array, "*A"]) -> Float[Array, "..."]:
    total = jnp.sum(jnp.where(where, x, 0.0), axes, keepdims=True)
    count = jnp.sum(where.astype(jnp.float32), axes, keepdims=True)
    return total / jnp.maximum(count, 1.0)

  center = mean(scores)
  centered = scores - center
  deviation = jnp.sqrt(mean(centered * centered))
  # The deviation of equal scores is rounding, and must not decide.
  flat = deviation <= 1e-5 * jnp.abs(center)
  z = centered / jnp.where(flat, 1.0, deviation)
  return jnp.where(where & ~flat, z, 0.0)
