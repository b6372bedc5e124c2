"""Selection on GPUs: a warpgroup bisects a row; XLA lists what is chosen."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.select.bisection import limits
from kvjax.kernels.select.keys import ordered
from kvjax.kernels.select.xla import true_slots_xla, within_limits

# Scores that a warpgroup looks at in one step: 16 bytes for each thread at
# least, and few enough to stay in registers.
_LEAST = 512
_STEP = 2048


def largest_gpu(
  scores: Float[Array, "*B T"], counts: Int[Array, "*B"], size: int
) -> Int[Array, "*B M"]:
  """See `kvjax.kernels.select.largest`."""
  slots = scores.shape[-1]
  rows = math.prod(counts.shape)
  step = min(_STEP, math.ceil(slots / _LEAST) * _LEAST)
  padded = jnp.pad(
    scores.reshape(rows, slots),
    ((0, 0), (0, -slots % step)),
    constant_values=-jnp.inf,
  )
  least, end = plgpu.kernel(
    lambda *refs: _kernel(*refs, step=step),
    out_type=[jax.ShapeDtypeStruct((rows,), jnp.int32)] * 2,
    grid=(rows,),
    grid_names=("row",),
  )(padded, jnp.minimum(counts, size).reshape(rows))
  one_each = (*counts.shape, 1)
  chosen = within_limits(scores, least.reshape(one_each), end.reshape(one_each))
  return true_slots_xla(chosen, size)


def true_slots_gpu(mask: Bool[Array, "*B T"], size: int) -> Int[Array, "*B M"]:
  """See `kernels.select.true_slots`; XLA's program reads the mask once."""
  return true_slots_xla(mask, size)


def _kernel(
  scores_ref: jax.Ref,
  counts_ref: jax.Ref,
  least_ref: jax.Ref,
  end_ref: jax.Ref,
  *,
  step: int,
) -> None:
  """Finds the limits of what is chosen of a row.

  Args:
    scores_ref: all rows; a row fits into the caches near the processor, from
      where every pass reads it again.
    counts_ref: how many to take of each row.
    least_ref: the least key that is chosen.
    end_ref: where the slots that have it end.
    step: scores per step, of which a row has a whole number.
  """
  row = jax.lax.axis_index("row")
  slots = scores_ref.shape[1]
  layout = plgpu.Layout.WG_STRIDED((step,), vec_size=4)
  lanes = plgpu.broadcasted_iota(jnp.int32, (step,), 0, layout=layout)

  def count(
    counted: Callable[[Int[Array, " C"], Int[Array, " C"]], Bool[Array, " C"]],
  ) -> Int[Array, ""]:
    def add(i: Array, total: Int[Array, " C"]) -> Int[Array, " C"]:
      start = i * step
      scores = plgpu.load(scores_ref.at[row, pl.ds(start, step)], layout=layout)
      chosen = counted(ordered(scores), lanes + start)
      return total + jnp.where(chosen, 1, 0)

    none = jnp.zeros_like(lanes)
    total = jax.lax.fori_loop(0, slots // step, add, none)
    counts: Array = jnp.sum(total)
    return counts

  least_ref[row], end_ref[row] = limits(count, counts_ref[row], slots)
