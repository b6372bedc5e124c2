"""Standardization of scores."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

Scope = Literal["head", "layer", "chunk"]


def standardize(
  scores: Float[Array, "B K T"],
  where: Bool[Array, "B K T"],
  scope: Scope,
  chunk: int = 0,
  start: int = 0,
) -> Float[Array, "B K T"]:
  """Standardizes to zero mean and unit variance; constant scores become 0.

  Args:
    scores: float32.
    where: slots that count; the others get 0.
    scope: which scores of a row are standardized together: those of each
      "head", of all heads of the "layer", or of all heads per "chunk" of slots.
    chunk: slots per chunk, the last of which may be shorter; 0 for one chunk.
    start: slot at which the first chunk begins; earlier slots do not count.
  """
  if scope == "head":
    return _standardize(scores, where, -1)
  if scope == "layer" or chunk == 0 or chunk >= scores.shape[2]:
    return _standardize(scores, where, (1, 2))
  batch, heads, slots = scores.shape
  # Padded in front, so that a chunk begins at `start`.
  before = -start % chunk
  padding = ((0, 0), (0, 0), (before, -(before + slots) % chunk))

  def chunks(x: Shaped[Array, "B K T"]) -> Shaped[Array, "B K C c"]:
    return jnp.pad(x, padding).reshape(batch, heads, -1, chunk)

  z = _standardize(chunks(scores), chunks(where), (1, 3))
  return z.reshape(batch, heads, -1)[..., before : before + slots]


def _standardize(
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
  # The deviation of equal scores is rounding, which must not be amplified.
  flat = deviation <= 1e-5 * jnp.abs(center)
  z = centered / jnp.where(flat, 1.0, deviation)
  return jnp.where(where & ~flat, z, 0.0)
