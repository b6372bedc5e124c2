"""From scores to the slots that are kept."""

from fractions import Fraction

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_HIGHEST = float(jnp.finfo(jnp.float32).max)
_LOWEST = float(jnp.finfo(jnp.float32).min)


def top_slots(
  scores: Float[Array, "B K T"],
  held: Bool[Array, "B K T"],
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
    held: slots that hold a token; no other slot is ever chosen.
    protected: slots that must stay.
    counts: slots to keep per row or per head, or all that are held where
      fewer are.
    capacity: M, static; at least every count.
    must_keep: slots that stay before the protected ones.

  Returns:
    Slot indices, then -1 for what is not filled.
  """
  counts = counts.reshape(scores.shape[0], -1, 1)
  scores = _finite(scores)
  if must_keep is None:
    must_keep = jnp.zeros(held.shape, bool)
  protected = protected & held & ~must_keep
  taken = jnp.sum(must_keep.astype(jnp.int32), axis=-1, keepdims=True)
  fits = age(protected) <= counts - taken
  scores = jnp.where(protected, jnp.where(fits, _HIGHEST, _LOWEST), scores)
  scores = jnp.where(must_keep, jnp.inf, scores)
  scores = jnp.where(held, scores, -jnp.inf)
  best, slots = jax.lax.top_k(scores, capacity)
  wanted = jnp.arange(capacity)[None, None] < counts
  slots_after_all = scores.shape[-1]
  slots = jnp.where(wanted & (best > -jnp.inf), slots, slots_after_all)
  slots = jnp.sort(slots, axis=-1)
  return jnp.where(slots < slots_after_all, slots, -1)


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
  batch = scores.shape[0]
  scores = jnp.where(candidates, _finite(scores), -jnp.inf)
  ascending = jnp.sort(scores.reshape(batch, -1), axis=-1)
  last = jnp.clip(ascending.shape[1] - total, 0, ascending.shape[1] - 1)
  threshold = jnp.take_along_axis(ascending, last[:, None], axis=1)[..., None]
  above = candidates & (scores > threshold)
  count = jnp.sum(above.astype(jnp.int32), axis=-1)
  left = total - jnp.sum(count, axis=-1)

  equal = (candidates & (scores == threshold)).astype(jnp.int32)
  by_slot = jnp.swapaxes(equal, 1, 2)
  rank = jnp.cumsum(by_slot.reshape(batch, -1), axis=-1)
  first = (rank <= left[:, None]).reshape(by_slot.shape)
  return count + jnp.sum(jnp.where(first, by_slot, 0), axis=1)


def _finite(scores: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
  scores = scores.astype(jnp.float32)
  return jnp.where(jnp.isfinite(scores), scores, _LOWEST)


def age(held: Bool[Array, "*B T"]) -> Int[Array, "*B T"]:
  """1 for the newest held slot, 2 for the one before it, and so on.

  Slots that hold nothing share the age of the held slot after them, or 0.
  """
  newest_first = held.astype(jnp.int32)[..., ::-1]
  return jnp.cumsum(newest_first, axis=-1)[..., ::-1]


def newest(
  held: Bool[Array, "B K T"],
  must_keep: Bool[Array, "B K T"],
  counts: Int[Array, "B #K"],
  window: int,
) -> Bool[Array, "B K T"]:
  """The last `window` tokens, or as many as fit beside what must be kept."""
  ages = age(held)
  needed = must_keep.astype(jnp.int32)
  outside = jnp.sum(jnp.where(ages > window, needed, 0), axis=-1)
  room = counts - outside
  fewer = jnp.maximum(counts - jnp.sum(needed, axis=-1), 0)
  size = jnp.where(room >= window, window, fewer)
  return held & (ages <= size[..., None])


def exact_share(share: float) -> Fraction:
  """The decimal of up to three places that a float stands for."""
  return Fraction(share).limit_denominator(1000)


def floor_share(counts: Int[Array, "*B"], share: float) -> Int[Array, "*B"]:
  """floor(share * counts), exact for shares of up to three decimals."""
  exact = exact_share(share)
  whole, rest = jnp.divmod(counts, exact.denominator)
  return whole * exact.numerator + rest * exact.numerator // exact.denominator


def round_share(counts: Int[Array, "*B"], share: float) -> Int[Array, "*B"]:
  """Nearest integers to share * counts, exact as `floor_share`."""
  exact = exact_share(share)
  whole, rest = jnp.divmod(counts, exact.denominator)
  twice = 2 * rest * exact.numerator + exact.denominator
  return whole * exact.numerator + twice // (2 * exact.denominator)


def true_slots(
  kept: Bool[Array, "B K T"], capacity: int
) -> Int[Array, "B K M"]:
  """The true slots in ascending order, then -1; at most `capacity` of them."""
  slots = kept.shape[-1]
  index = jnp.arange(slots, dtype=jnp.int32)
  order = jnp.sort(jnp.where(kept, index[None, None], slots), axis=-1)
  order = order[..., :capacity]
  return jnp.where(order < slots, order, -1)
