"""Finds a top-k threshold by bisection over integer keys."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.kernels.select.keys import BEYOND, NEVER

# One number per row, in a shape that broadcasts against the program's keys.
Rows = Int[Array, "*R"]
# Counts, per row, the slots for which a predicate of key and slot holds.
Count = Callable[[Callable[[Array, Array], Array]], Rows]


def is_chosen(keys: Array, slots: Array, least: Array, end: Array) -> Array:
  """Selects keys above the least, and keys equal to it before slot `end`."""
  return (keys > least) | ((keys == least) & (slots < end))


def limits(count: Count, wanted: Rows, slots: int) -> tuple[Rows, Rows]:
  """Finds the least selected key, and the end of the slots selected at it.

  Args:
    count: counts slots of each row.
    wanted: how many slots to select; all eligible ones if they are fewer.
    slots: T.
  """

  def count_from(key: Rows) -> Rows:
    return count(lambda keys, _: keys >= key)

  def count_chosen(excluded: Rows) -> Rows:
    return count(lambda keys, at: is_chosen(keys, at, least, slots - excluded))

  eligible = count_from(_all(wanted, NEVER + 1))
  # Bisection needs a count at `low` that suffices.
  wanted = jnp.clip(wanted, 0, eligible)
  any_wanted = wanted > 0
  # First the key: how many slots have a key of at least x?
  least, low_count = _bisect(
    count_from,
    # A row that wants nothing is closed from the start: no key reaches BEYOND.
    jnp.where(any_wanted, NEVER + 1, BEYOND),
    _all(wanted, BEYOND),
    jnp.where(any_wanted, eligible, 0),
    wanted,
  )
  # Then the ties at this key: how many slots at the end to exclude?
  excluded, _ = _bisect(
    count_chosen,
    _all(least, 0),
    # Excluding every tie leaves too few, unless `low` already matches.
    _all(least, slots),
    low_count,
    wanted,
  )
  return least, slots - excluded


def _all(rows: Rows, value: int) -> Rows:
  """Returns one value for all rows."""
  # Mosaic refuses scalars that are constants, such as those of `full_like`.
  return rows * 0 + value


def _bisect(
  count: Callable[[Rows], Rows],
  low: Rows,
  high: Rows,
  low_count: Rows,
  wanted: Rows,
) -> tuple[Rows, Rows]:
  """Finds the greatest x with count(x) >= wanted, or an x with equality.

  Args:
    count: a function that never increases with x.
    low: an x whose count suffices.
    high: an x above low whose count is too small.
    low_count: count(low).
    wanted: the count to reach.

  Returns:
    x and its count.
  """

  def is_open(state: tuple[Rows, Rows, Rows]) -> Bool[Array, ""]:
    low, high, low_count = state
    is_open = (low_count != wanted) & (low < high - 1)
    # The GPU kernel bisects one row per program, with scalars.
    return jnp.any(is_open) if is_open.ndim else is_open

  def halve(state: tuple[Rows, Rows, Rows]) -> tuple[Rows, Rows, Rows]:
    low, high, low_count = state
    middle = (low & high) + ((low ^ high) >> 1)  # low + high would overflow
    # A closed row repeats its `low`, or moves to an x of equal count.
    middle_count = count(middle)
    enough = middle_count >= wanted
    return (
      jnp.where(enough, middle, low),
      jnp.where(enough, high, middle),
      jnp.where(enough, middle_count, low_count),
    )

  low, _, low_count = jax.lax.while_loop(is_open, halve, (low, high, low_count))
  return low, low_count
