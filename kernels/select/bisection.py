"""Halving a range until what lies above its lower end counts as wanted."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.kernels.select.keys import BEYOND, NEVER

# A number for each row, in a shape that compares with a program's keys.
Rows = Int[Array, "*R"]
# Of each row how many slots, given with their keys, count.
Count = Callable[[Callable[[Array, Array], Array]], Rows]


def is_chosen(keys: Array, slots: Array, least: Array, end: Array) -> Array:
  """Slots whose key is above the least, or equal to it and before the end."""
  return (keys > least) | ((keys == least) & (slots < end))


def limits(count: Count, wanted: Rows, slots: int) -> tuple[Rows, Rows]:
  """The least key that is chosen, and where the slots that have it end.

  Args:
    count: counts slots of each row.
    wanted: how many to choose; all eligible where they are fewer.
    slots: T.
  """

  def reaching(key: Rows) -> Rows:
    return count(lambda keys, _: keys >= key)

  def chosen(left_out: Rows) -> Rows:
    return count(lambda keys, at: is_chosen(keys, at, least, slots - left_out))

  eligible = reaching(jnp.full_like(wanted, NEVER + 1))
  wanted = jnp.clip(wanted, 0, eligible)
  some = wanted > 0
  least, found = _bisected(
    reaching,
    jnp.where(some, NEVER + 1, BEYOND),
    jnp.full_like(wanted, BEYOND),
    jnp.where(some, eligible, 0),
    wanted,
  )
  left_out, _ = _bisected(
    chosen,
    jnp.zeros_like(least),
    jnp.full_like(least, slots),
    found,
    wanted,
  )
  return least, slots - left_out


def _bisected(
  count: Callable[[Rows], Rows],
  low: Rows,
  high: Rows,
  found: Rows,
  wanted: Rows,
) -> tuple[Rows, Rows]:
  """The greatest x that counts as many as wanted, or one that counts just that.

  Args:
    count: never rises with x.
    low: counts enough.
    high: above low; counts too few.
    found: count(low).
    wanted: to be counted.

  Returns:
    x and its count.
  """

  def is_open(state: tuple[Rows, Rows, Rows]) -> Bool[Array, ""]:
    low, high, found = state
    is_open = (found != wanted) & (low < high - 1)
    return jnp.any(is_open) if is_open.ndim else is_open

  def halved(state: tuple[Rows, Rows, Rows]) -> tuple[Rows, Rows, Rows]:
    low, high, found = state
    middle = (low & high) + ((low ^ high) >> 1)  # a sum would overflow
    counted = count(middle)
    enough = counted >= wanted
    return (
      jnp.where(enough, middle, low),
      jnp.where(enough, high, middle),
      jnp.where(enough, counted, found),
    )

  low, _, found = jax.lax.while_loop(is_open, halved, (low, high, found))
  return low, found
