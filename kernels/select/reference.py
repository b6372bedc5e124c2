"""Reference selection by a stable sort, in NumPy."""

import numpy as np
from jaxtyping import Bool, Float, Int


def largest_reference(
  scores: Float[np.ndarray, "*B T"], counts: Int[np.ndarray, "*B"], size: int
) -> Int[np.ndarray, "*B M"]:
  """Computes `kvjax.kernels.select.largest`."""
  slots = scores.shape[-1]
  ranked = np.where(np.isnan(scores), -np.inf, scores)
  # Stable: among equal scores, the lower slot comes first.
  order = np.argsort(-ranked, axis=-1, kind="stable")
  eligible = np.take_along_axis(ranked, order, axis=-1) > -np.inf
  wanted = np.arange(slots) < np.minimum(counts, size)[..., None]
  chosen = np.sort(np.where(eligible & wanted, order, slots), axis=-1)
  return np.where(chosen < slots, chosen, -1).astype(np.int32)[..., :size]


def mask_to_slots_reference(
  mask: Bool[np.ndarray, "*B T"], size: int
) -> Int[np.ndarray, "*B M"]:
  """Computes `kvjax.kernels.select.mask_to_slots`."""
  slots = np.where(mask, np.arange(mask.shape[-1]), mask.shape[-1])
  first = np.sort(slots, axis=-1)[..., :size]
  return np.where(first < mask.shape[-1], first, -1).astype(np.int32)
