"""Top-k selection: the slots of a head's largest scores.

Leading axes are batch rows and heads, in this order, or any others. Under vmap,
the mapped axis becomes another leading axis, so that one program still gets the
full array.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.dispatch import dispatch
from kvjax.kernels.programs import Programs
from kvjax.kernels.select import xla

_LARGEST = Programs.of(xla.largest_xla)
_TRUE = Programs.of(xla.mask_to_slots_xla)


# Compiled, as eager calls of `custom_vmap` would compile again each time.
@functools.partial(jax.jit, static_argnames="size", inline=True)
def largest(
  scores: Float[Array, "*B T"], counts: Int[Array, "*B"], size: int
) -> Int[Array, "*B M"]:
  """Lists the slots of the largest scores of each head, in ascending order.

  The result is exact and takes time proportional to T. XLA's program sorts rows
  of up to 2,048 scores, which compiles faster. Among equal scores (0.0 equals
  -0.0) the lower slot wins. Scores of -inf or NaN are never selected.

  Args:
    scores: one per slot; compared in float32.
    counts: how many slots to select per head, at most `size`.
    size: M, static.

  Returns:
    Slots, padded with -1.
  """
  return _list_slots(_LARGEST, size, _to_float32(scores), counts)


def mask_to_slots(mask: Bool[Array, "*B T"], size: int) -> Int[Array, "*B M"]:
  """Lists the first `size` true slots of each head, in ascending order.

  Args:
    mask: which slots to list.
    size: M, static.

  Returns:
    Slots, padded with -1.
  """
  return _list_slots(_TRUE, size, mask)


@functools.partial(jax.jit, inline=True)
def among_largest(
  scores: Float[Array, "*B T"], counts: Int[Array, "*B"]
) -> Bool[Array, "*B T"]:
  """Computes the mask of the slots that `largest` selects, without size limit.

  XLA's program runs on all devices, in time proportional to T.
  """
  return _run_unmapped(xla.among_largest_xla, _to_float32(scores), counts)


@functools.partial(jax.jit, inline=True)
def kth_largest(
  scores: Float[Array, "*B T"], counts: Int[Array, "*B"]
) -> Float[Array, "*B"]:
  """Computes the smallest of the `counts` largest scores.

  It is the smallest of all scores if there are fewer, and inf if counts is 0 or
  there are no scores; -inf and NaN do not count as scores. XLA's program runs
  on all devices, in time proportional to T.
  """
  return _run_unmapped(xla.kth_largest_xla, _to_float32(scores), counts)


def slots_to_mask(lists: Int[Array, "*B M"], slots: int) -> Bool[Array, "*B T"]:
  """Computes the mask of the listed slots; the inverse of `mask_to_slots`.

  Args:
    lists: slots in any order, duplicates allowed; negative numbers are ignored.
    slots: T, static.
  """
  return xla.slots_to_mask_xla(lists, slots)


def _to_float32(scores: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
  # The selection is piecewise constant in the scores: its gradient is zero.
  # Float32 represents all numbers of 16 bits, so no order is lost.
  return jax.lax.stop_gradient(scores).astype(jnp.float32)


def _list_slots(
  programs: Programs, size: int, *operands: Array
) -> Int[Array, "*B M"]:
  # Programs list at most T slots; places beyond are always empty.
  limit = min(size, operands[0].shape[-1])
  run = functools.partial(_dispatched, programs, limit)
  slots = _run_unmapped(run, *operands)
  more = [(0, 0)] * (slots.ndim - 1) + [(0, size - limit)]
  return jnp.pad(slots, more, constant_values=-1)


def _dispatched(
  programs: Programs, size: int, *operands: Array
) -> Int[Array, "*B M"]:
  # custom_vmap traces this once with fewer leading axes.
  # Only [B, K, T] or wider arrays have the axes that a mesh shards.
  spread = "BK" if operands[0].ndim >= 3 else ""
  slots: Array = dispatch(
    programs, operands, (spread,) * len(operands), spread, size=size
  )
  return slots


def _run_unmapped(run: Callable[..., Array], *operands: Array) -> Array:
  """Runs on the full arrays under vmap; mapped axes become leading axes."""

  @custom_vmap
  def call(*operands: Array) -> Array:
    return run(*operands)

  @call.def_vmap
  def batched(
    size: int, in_batched: list[bool], *operands: Array
  ) -> tuple[Array, bool]:
    # All operands need the same leading axes, which programs flatten to rows.
    mapped = (
      x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
      for x, has_axis in zip(operands, in_batched, strict=True)
    )
    # A custom_vmap again, so that nested vmaps end up here as well.
    return _run_unmapped(run, *mapped), True

  result: Array = call(*operands)
  return result
