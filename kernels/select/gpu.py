"""Selection on GPUs: a warpgroup bisects a row, XLA lists the slots."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels import tuning
from kvjax.kernels.select.bisection import limits
from kvjax.kernels.select.keys import ordered
from kvjax.kernels.select.xla import mask_to_slots_xla, within_limits

# Scores that a warpgroup loads at once, 16 bytes per thread: a fact of the
# hardware.
_LOAD = 512


def largest_gpu(
  scores: Float[Array, "*B T"], counts: Int[Array, "*B"], size: int
) -> Int[Array, "*B M"]:
  """Computes `kvjax.kernels.select.largest`.

  Raises:
    NotImplementedError: nothing is to be selected.
  """
  slots = scores.shape[-1]
  if not scores.size or not size:
    raise NotImplementedError("There is nothing to select.")
  rows = math.prod(counts.shape)
  # More scores per step than a warpgroup has registers for would be slow.
  step = tuning.option("select/gpu", "step")
  step = min(step, math.ceil(slots / _LOAD) * _LOAD)
  # Slots of -inf are never selected, so padding needs no mask.
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
  per_row = (*counts.shape, 1)
  # `end` counts from the first slot, so that padding does not shift it.
  chosen = within_limits(scores, least.reshape(per_row), end.reshape(per_row))
  return mask_to_slots_xla(chosen, size)


def mask_to_slots_gpu(
  mask: Bool[Array, "*B T"], size: int
) -> Int[Array, "*B M"]:
  """Computes `kvjax.kernels.select.mask_to_slots` by XLA, in one pass."""
  return mask_to_slots_xla(mask, size)


def _kernel(
  scores_ref: jax.Ref,
  counts_ref: jax.Ref,
  least_ref: jax.Ref,
  end_ref: jax.Ref,
  *,
  step: int,
) -> None:
  """Finds the selection limits of a row; see `bisection.limits`.

  Args:
    scores_ref: all rows. A row fits into the cache, where every pass of the
      bisection finds it again.
    counts_ref: how many slots to select of each row.
    least_ref: output, the least selected key.
    end_ref: output, the end of the slots selected at this key.
    step: scores per step, a divisor of the row length.
  """
  row = jax.lax.axis_index("row")
  slots = scores_ref.shape[1]
  # Four float32 numbers, 16 bytes, are the widest load of a thread.
  layout = plgpu.Layout.WG_STRIDED((step,), vec_size=4)
  lanes = plgpu.broadcasted_iota(jnp.int32, (step,), 0, layout=layout)

  def count(
    predicate: Callable[
      [Int[Array, " C"], Int[Array, " C"]], Bool[Array, " C"]
    ],
  ) -> Int[Array, ""]:
    def add(i: Array, total: Int[Array, " C"]) -> Int[Array, " C"]:
      start = i * step
      scores = plgpu.load(scores_ref.at[row, pl.ds(start, step)], layout=layout)
      chosen = predicate(ordered(scores), lanes + start)
      # Every thread counts alone; only the end of a pass is a reduction.
      return total + jnp.where(chosen, 1, 0)

    zeros = jnp.zeros_like(lanes)
    total = jax.lax.fori_loop(0, slots // step, add, zeros)
    counts: Array = jnp.sum(total)
    return counts

  least_ref[row], end_ref[row] = limits(count, counts_ref[row], slots)
