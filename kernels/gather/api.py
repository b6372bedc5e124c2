"""Copies of the slots that a cache keeps."""

import jax
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.dispatch import Implementation, Programs, dispatch
from kvjax.kernels.gather.compacted import Compacted
from kvjax.kernels.gather.gpu import compact_gpu
from kvjax.kernels.gather.tpu import compact_tpu
from kvjax.kernels.gather.xla import compact_xla

_PROGRAMS = Programs(compact_xla, compact_tpu, compact_gpu)


def compact(
  keys: Shaped[Array, "B K T D"],
  values: Shaped[Array, "B K T Dv"],
  positions: Int[Array, "B K T"],
  received: Float[Array, "B K T"] | None,
  slots: Int[Array, "B K M"],
  implementation: Implementation | None = None,
) -> Compacted:
  """Copies listed slots, bit by bit, with all that is known of them.

  A slot that is empty (its position is -1) may be listed and is copied with
  whatever it holds; what is not listed has no effect.

  Args:
    keys: keys, of any dtype.
    values: values, of the same dtype.
    positions: each token's place in its row; -1 for an empty slot.
    received: one more number of each slot, in float32.
    slots: which to copy, each less than T, ascending in every head; -1, for no
      slot, may stand anywhere.
    implementation: see `kvjax.kernels.use`.

  Returns:
    For each listed slot what it holds. Where no slot is named: position -1,
    and zeros.
  """
  operands = (keys, values, positions, received, slots)
  spread = jax.tree.map(
    lambda _: "BK", Compacted(keys, values, positions, received)
  )
  compacted: Compacted = dispatch(
    _PROGRAMS, implementation, operands, ("BK",) * 5, spread
  )
  return compacted
