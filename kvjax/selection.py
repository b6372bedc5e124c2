"""From scores to the slots that are kept."""

from fractions import Fraction

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.select import among_largest, largest
from kvjax.kernels.select import true_slots as true_slots

_HIGHEST = float(jnp.finfo(jnp.float32).max)
_LOWEST = float(jnp.finfo(jnp.float32).min)


def top_slots(
  scores: Float[Array, "B K T"],
  valid: Bool[Array, "B K T"],
  protected: Bool[Array, "B K T"],
  counts: Int[Array, " B"] | Int[Array, "B K"],
  capacity: int,
  must_keep: Bool[Array, "B K T"] | None = None,
) -> Int[Array, "B K M"]:
  """Slots of the highest scores, in ascending order.

  What must be kept comes first, then protected slots, then all others; where
  protected slots are too many, the newest of them are kept. Equal scores keep
  the lower slot; a score that is not finite counts as the lowest.

  Args:
    scores: one score per slot.
    valid: slots that hold a token; no other slot is ever chosen.
    protected: slots that must stay.
    counts: slots to keep per row or per head, or all that are held where
      fewer are.
    capacity: M, static; at least every count.
    must_keep: slots that stay before the protected ones.

  Returns:
    Slot indices, then -1 for what is not filled.
  """
  counts = counts.reshape(scores.shape[0], -1, 1)
  scores = finite(scores)
  if must_keep is None:
    must_keep = jnp.zeros(valid.shape, bool)
  protected = protected & valid & ~must_keep
  taken = jnp.sum(must_keep.astype(jnp.int32), axis=-1, keepdims=True)
  fits = age(protected) <= counts - taken
  scores = jnp.where(protected, jnp.where(fits, _HIGHEST, _LOWEST), scores)
  scores = jnp.where(must_keep, jnp.inf, scores)
  scores = jnp.where(valid, scores, -jnp.inf)
  counts = jnp.broadcast_to(counts[..., 0], scores.shape[:-1])
  return largest(scores, counts, capacity)


def head_counts(
  scores: Float[Array, "B K T"],
  candidates: Bool[Array, "B K T"],
  total: Int[Array, " B"],
) -> Int[Array, "B K"]:
  """How many slots of each head are among the best of all heads together.

  Equal scores prefer the lower slot, then the lower head; a score that is not
  finite counts as the lowest. `top_slots` with these counts keeps the best.

  Args:
    scores: one score per slot, comparable between heads.
    candidates: slots that compete.
    total: how many slots win in a row, over all its heads; all candidates
      where they are fewer.
  """
  scores = jnp.where(candidates, finite(scores), -jnp.inf)
  by_slot = jnp.swapaxes(scores, 1, 2)
  rows = by_slot.reshape(scores.shape[0], -1)
  best = among_largest(rows, total).reshape(by_slot.shape)
  return jnp.sum(best.astype(jnp.int32), axis=1)


def finite(scores: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
  """Float32 scores; the lowest there is for those that are not finite."""
  scores = scores.astype(jnp.float32)
  return jnp.where(jnp.isfinite(scores), scores, _LOWEST)


def age(valid: Bool[Array, "*B T"]) -> Int[Array, "*B T"]:
  """1 for the newest held slot, 2 for the one before it, and so on.

  Slots that hold nothing share the age of the held slot after them, or 0.
  """
  newest_first = valid.astype(jnp.int32)[..., ::-1]
  return jnp.cumsum(newest_first, axis=-1)[..., ::-1]


def newest(
  valid: Bool[Array, "B K T"],
  must_keep: Bool[Array, "B K T"],
  counts: Int[Array, "B #K"],
  window: int,
) -> Bool[Array, "B K T"]:
  """The last `window` tokens, or as many as fit beside what must be kept."""
  ages = age(valid)
  needed = must_keep.astype(jnp.int32)
  outside = jnp.sum(jnp.where(ages > window, needed, 0), axis=-1)
  room = counts - outside
  fewer = jnp.maximum(counts - jnp.sum(needed, axis=-1), 0)
  size = jnp.where(room >= window, window, fewer)
  return valid & (ages <= size[..., None])


def exact_share(share: float) -> Fraction:
  """The decimal of up to three places that a float stands for."""
  return Fraction(share).limit_denominator(1000)


def floor_share(counts: Int[Array, "*B"], share: float) -> Int[Array, "*B"]:
  """floor(share * counts), exact for shares of up to three decimals."""
  exact = exact_share(share)
  whole, rest = jnp.divmod(counts, exact.denominator)
  return whole * exact.numerator + rest * exact.numerator // exact.denominator
