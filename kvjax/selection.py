"""Selection of slots by scores."""

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.select import among_largest, largest

_HIGHEST = float(jnp.finfo(jnp.float32).max)
# Below the scores of protected slots.
_INFINITE = float(np.nextafter(np.float32(_HIGHEST), np.float32(0)))
_LOWEST = float(jnp.finfo(jnp.float32).min)


def top_slots(
  scores: Float[Array, "B K T"],
  valid: Bool[Array, "B K T"],
  protected: Bool[Array, "B K T"],
  counts: Int[Array, " B"] | Int[Array, "B K"],
  capacity: int,
  must_keep: Bool[Array, "B K T"] | None = None,
) -> Int[Array, "B K M"]:
  """Selects the slots with the highest scores, in ascending order.

  Slots in `must_keep` come first, then protected slots, then all others. If
  there are too many protected slots, the newest of them are kept. Ties prefer
  the lower slot. Infinity is the highest score; NaN counts as the lowest.

  Args:
    scores: one score per slot.
    valid: slots that contain a token; no other slot is selected.
    protected: slots to keep whatever their score.
    counts: slots to keep per row or per head; all valid ones if there are
      fewer.
    capacity: M, static; at least every count.
    must_keep: slots to keep before the protected ones.

  Returns:
    Slot indices, then -1.
  """
  counts = counts.reshape(scores.shape[0], -1, 1)
  scores = finite(scores)
  if must_keep is None:
    must_keep = jnp.zeros(valid.shape, bool)
  protected = protected & valid & ~must_keep
  num_must_keep = jnp.sum(must_keep, axis=-1, keepdims=True, dtype=jnp.int32)
  # The rest of a budget goes to the newest protected slots; those that do not
  # fit are never reached.
  fits = age(protected) <= counts - num_must_keep
  scores = jnp.where(protected, jnp.where(fits, _HIGHEST, _LOWEST), scores)
  scores = jnp.where(must_keep, jnp.inf, scores)
  # `largest` never selects -inf, which is why `finite` leaves it unused.
  scores = jnp.where(valid, scores, -jnp.inf)
  counts = jnp.broadcast_to(counts[..., 0], scores.shape[:-1])
  return largest(scores, counts, capacity)


def head_counts(
  scores: Float[Array, "B K T"],
  candidates: Bool[Array, "B K T"],
  total: Int[Array, " B"],
) -> Int[Array, "B K"]:
  """Counts the slots of each head among the best of all heads together.

  Ties prefer the lower slot, then the lower head. Infinity is the highest
  score; NaN counts as the lowest. `top_slots` with these counts selects the
  best slots.

  Args:
    scores: one score per slot, comparable between heads.
    candidates: slots that compete.
    total: number of best slots of a row, over all its heads; all candidates if
      there are fewer.
  """
  scores = jnp.where(candidates, finite(scores), -jnp.inf)
  # Slots before heads, as ties prefer the first place of the flat row.
  by_slot = jnp.swapaxes(scores, 1, 2)
  rows = by_slot.reshape(scores.shape[0], -1)
  best = among_largest(rows, total).reshape(by_slot.shape)
  return jnp.sum(best, axis=1, dtype=jnp.int32)


def finite(scores: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
  """Makes infinite scores large numbers, and NaN the lowest."""
  scores = scores.astype(jnp.float32)
  return jnp.nan_to_num(scores, nan=_LOWEST, posinf=_INFINITE, neginf=_LOWEST)


def age(valid: Bool[Array, "*B T"]) -> Int[Array, "*B T"]:
  """Ages of slots: 1 for the newest valid one, 2 for the one before, and so on.

  Empty slots have the age of the valid slot after them, or 0.
  """
  newest_first = valid.astype(jnp.int32)[..., ::-1]
  return jnp.cumsum(newest_first, axis=-1)[..., ::-1]


def last_tokens(
  valid: Bool[Array, "*B T"], number: int | Int[Array, "*#B"]
) -> Bool[Array, "*B T"]:
  """Mask of the last `number` tokens, or of all if there are fewer."""
  limit = number if isinstance(number, int) else number[..., None]
  return valid & (age(valid) <= limit)


def newest(
  valid: Bool[Array, "B K T"],
  must_keep: Bool[Array, "B K T"],
  counts: Int[Array, " B #K"],
  window: int,
) -> Bool[Array, "B K T"]:
  """Mask of the last `window` tokens, or of as many as `counts` allows."""
  ages = age(valid)
  needed = must_keep.astype(jnp.int32)
  # Tokens to keep inside the window need no room of their own. If the window
  # does not fit besides the others, it gets what all of these leave.
  outside = jnp.where(ages > window, needed, 0)
  num_outside = jnp.sum(outside, axis=-1, dtype=jnp.int32)
  remaining = counts - num_outside
  num_needed = jnp.sum(needed, axis=-1, dtype=jnp.int32)
  fallback = jnp.maximum(counts - num_needed, 0)
  size = jnp.where(remaining >= window, window, fallback)
  return valid & (ages <= size[..., None])


def exact_share(share: float) -> Fraction:
  """The decimal of up to three places that a float approximates."""
  return Fraction(share).limit_denominator(1000)


def floor_share(counts: Int[Array, "*B"], share: float) -> Int[Array, "*B"]:
  """floor(share * counts), exact for shares of up to three decimals."""
  # In floating point, 0.29 * 100 is less than 29.
  exact = exact_share(share)
  # counts * numerator could exceed 32 bits; these products do not.
  quotient, remainder = jnp.divmod(counts, exact.denominator)
  return (
    quotient * exact.numerator
    + remainder * exact.numerator // exact.denominator
  )
