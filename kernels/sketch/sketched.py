"""The sketch of keys, and helpers that the kernels share."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from kvjax.kernels.chunks import by_chunk

# The mean of a chunk is estimated from this many runs of this many slots each;
# contiguous runs need no gather.
_RUNS, _RUN = 4, 16


class Sketch(NamedTuple):
  """Keys times a factor with k columns, in C chunks of W slots.

  Slots are the last axis: TPUs would pad a last axis of size k to 128. W may
  exceed the size of a chunk, with columns of zeros.

  Attributes:
    projected: a column for every slot, zero for invalid slots.
    mean: has yet to be subtracted from the columns of a chunk.
    gram: Gram matrix of each chunk, over the centered columns of valid slots.
  """

  projected: Float[Array, "B K C k W"]
  mean: Float[Array, "B K C k"]
  gram: Float[Array, "B K C k k"]

  def rows(
    self, valid: Bool[Array, "B K T"], chunk: int
  ) -> Float[Array, "B K C S k"]:
    """Returns the sketched key of every slot, zero for invalid slots."""
    return jnp.swapaxes(self._columns(valid, chunk), -1, -2)

  def transformed(
    self,
    matrix: Float[Array, "B K C k k"],
    valid: Bool[Array, "B K T"],
    chunk: int,
  ) -> "Sketch":
    """Multiplies the centered columns by the matrix of their chunk.

    The Gram matrix is summed again, over the products.
    """
    columns = jnp.einsum(
      "bkcfe,bkcew->bkcfw",
      matrix,
      self._columns(valid, chunk),
      precision="highest",
    )
    gram = jnp.einsum(
      "bkcew,bkcfw->bkcef", columns, columns, precision="highest"
    )
    return Sketch(columns, jnp.zeros_like(self.mean), gram)

  def _columns(
    self, valid: Bool[Array, "B K T"], chunk: int
  ) -> Float[Array, "B K C k S"]:
    valid_slots = by_chunk(valid, chunk)[..., None, :]
    columns = (
      self.projected[..., : valid_slots.shape[-1]] - self.mean[..., None]
    )
    return jnp.where(valid_slots, columns, 0.0)


def identity(heads: int, dim: int) -> Float[Array, "K D D"]:
  """Returns an identity factor for each head."""
  eye = jnp.eye(dim, dtype=jnp.float32)
  return jnp.broadcast_to(eye, (heads, dim, dim))


def near_mean(
  keys: Float[Array, "B K C W D"], valid: Bool[Array, "B K C W"]
) -> Float[Array, "B K C D"]:
  """Estimates the mean of each chunk's valid keys from a few runs of slots.

  It is zero if these have no valid slot. Subtracting it from keys first avoids
  the cancellation error of centering by sums.
  """
  slots = valid.shape[-1]
  # Runs of short chunks overlap, which an estimate can afford.
  starts = [slots * run // _RUNS for run in range(_RUNS)]

  def sample(x: Shaped[Array, "B K C W *D"]) -> Shaped[Array, "B K C S *D"]:
    runs = [x[:, :, :, start : start + _RUN] for start in starts]
    return jnp.concatenate(runs, axis=3)

  sampled_valid = sample(valid)
  sampled_keys = jnp.where(
    sampled_valid[..., None], sample(keys).astype(jnp.float32), 0.0
  )
  count = jnp.sum(sampled_valid.astype(jnp.float32), axis=-1, keepdims=True)
  return jnp.sum(sampled_keys, axis=3) / jnp.maximum(count, 1.0)


def centered(
  projected: Float[Array, "B K C k W"],
  total: Float[Array, "B K C k"],
  moment: Float[Array, "B K C k k"],
  valid: Bool[Array, "B K C S"],
) -> Sketch:
  """Builds the centered sketch from columns shifted by a near mean.

  Args:
    projected: the columns.
    total: their sums over valid slots.
    moment: sums of their outer products.
    valid: valid slots.
  """
  count = jnp.sum(valid.astype(jnp.float32), axis=-1)[..., None]
  mean = total / jnp.maximum(count, 1.0)
  # The columns are written before their mean is known, so that only the Gram
  # matrix is corrected: sum (x - m)(x - m)' = sum x x' - n m m'.
  outer = mean[..., :, None] * mean[..., None, :]
  return Sketch(projected, mean, moment - count[..., None] * outer)
