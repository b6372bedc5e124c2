"""The largest of a head's scores, as a list of slots.

Leading axes are rows of a batch and heads, in this order, or any others. The
functions may be called under vmap too: its axis is put before them, so that
one program still sees the whole array.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.dispatch import Implementation, Programs, dispatch
from kvjax.kernels.select import gpu, tpu, xla

_LARGEST = Programs(xla.largest_xla, tpu.largest_tpu, gpu.largest_gpu)
_TRUE = Programs(xla.true_slots_xla, tpu.true_slots_tpu, gpu.true_slots_gpu)


def largest(
  scores: Float[Array, "*B T"],
  counts: Int[Array, "*B"],
  size: int,
  implementation: Implementation | None = None,
) -> Int[Array, "*B M"]:
  """The slots of the largest scores of each head, in ascending order.

  Exact, in time proportional to T; XLA's program sorts rows of up to 2,048,
  which compiles sooner. Of equal scores, which 0.0 and -0.0 are,
  the lower slot is taken. A score of -inf or NaN is never taken; inf may be.

  Args:
    scores: one per slot; compared in float32.
    counts: how many to take per head; `size` where it is more, and no more
      than there are.
    size: M, static.
    implementation: see `kvjax.kernels.use`.

  Returns:
    Slots, then -1 for what is not filled.
  """
  return _listed(_LARGEST, size, implementation, _float32(scores), counts)


def true_slots(
  mask: Bool[Array, "*B T"],
  size: int,
  implementation: Implementation | None = None,
) -> Int[Array, "*B M"]:
  """The true slots of each head in ascending order, the first `size` of them.

  Args:
    mask: which slots are meant.
    size: M, static.
    implementation: see `kvjax.kernels.use`.

  Returns:
    Slots, then -1 for what is not filled.
  """
  return _listed(_TRUE, size, implementation, mask)


def among_largest(
  scores: Float[Array, "*B T"], counts: Int[Array, "*B"]
) -> Bool[Array, "*B T"]:
  """Which slots `largest` would list, were there room for all.

  XLA's program computes it everywhere, in time proportional to T.
  """
  return _whole(xla.among_largest_xla, _float32(scores), counts)


def kth_largest(
  scores: Float[Array, "*B T"], counts: Int[Array, "*B"]
) -> Float[Array, "*B"]:
  """The least of the `counts` largest scores.

  It is the least of all where there are fewer, and inf where none is asked for
  or there is none; -inf and NaN do not count as scores. XLA's program computes
  it everywhere, in time proportional to T.
  """
  return _whole(xla.kth_largest_xla, _float32(scores), counts)


def named_slots(lists: Int[Array, "*B M"], slots: int) -> Bool[Array, "*B T"]:
  """Which of T slots a list names; the inverse of `true_slots`.

  Args:
    lists: slots in any order, as often as they like; a negative number names
      none.
    slots: T, static.
  """
  return xla.named_slots_xla(lists, slots)


def _float32(scores: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
  # What is chosen does not follow small changes of the scores.
  return jax.lax.stop_gradient(scores).astype(jnp.float32)


def _listed(
  programs: Programs,
  size: int,
  implementation: Implementation | None,
  *operands: Array,
) -> Int[Array, "*B M"]:
  most = min(size, operands[0].shape[-1])
  run = functools.partial(_dispatched, programs, most, implementation)
  slots = _whole(run, *operands)
  more = [(0, 0)] * (slots.ndim - 1) + [(0, size - most)]
  return jnp.pad(slots, more, constant_values=-1)


def _dispatched(
  programs: Programs,
  size: int,
  implementation: Implementation | None,
  *operands: Array,
) -> Int[Array, "*B M"]:
  # Fewer leading axes are seen for a moment, on the way out of vmap.
  spread = "BK" if operands[0].ndim >= 3 else ""
  slots: Array = dispatch(
    programs,
    implementation,
    operands,
    (spread,) * len(operands),
    spread,
    size=size,
  )
  return slots


def _whole(run: Callable[..., Array], *operands: Array) -> Array:
  """Runs on whole arrays; axes of vmap are put before their own."""

  @custom_vmap
  def call(*operands: Array) -> Array:
    return run(*operands)

  @call.def_vmap
  def batched(
    size: int, in_batched: list[bool], *operands: Array
  ) -> tuple[Array, bool]:
    whole = (
      x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
      for x, has_axis in zip(operands, in_batched, strict=True)
    )
    return _whole(run, *whole), True

  answer: Array = call(*operands)
  return answer
