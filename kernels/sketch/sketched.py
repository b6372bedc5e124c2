"""What a sketch of keys is, and how kernels put it together."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

# Places of a chunk, and slots at each, whose mean is near enough to that of the
# chunk. What is there need not be gathered.
_PLACES, _NEAR = 4, 16


class Sketch(NamedTuple):
  """Keys times a factor with k columns, in C chunks of W slots.

  Slots are the last axis, where k as the last would be padded to 128 on TPUs.
  There may be a few more than a chunk has, with columns of zeros.

  Attributes:
    projected: a column for every slot, zero where nothing is held.
    mean: what has still to be subtracted from the columns of a chunk.
    gram: sums over the held slots of a chunk of the outer products of their
      columns, the mean subtracted.
  """

  projected: Float[Array, "B K C k W"]
  mean: Float[Array, "B K C k"]
  gram: Float[Array, "B K C k k"]

  def rows(
    self, valid: Bool[Array, "B K T"], chunk: int
  ) -> Float[Array, "B K C S k"]:
    """The sketched key of every slot of a chunk, zero where none is held."""
    there = by_chunk(valid, chunk)[..., None, :]
    columns = self.projected[..., : there.shape[-1]] - self.mean[..., None]
    return jnp.swapaxes(jnp.where(there, columns, 0.0), -1, -2)


def by_chunk(
  x: Shaped[Array, "B K T *D"], chunk: int
) -> Shaped[Array, "B K C W *D"]:
  """The slots in chunks; zeros fill the last one."""
  length = x.shape[2]
  size = _size(chunk, length)
  wide = ((0, 0), (0, 0), (0, -length % size)) + ((0, 0),) * (x.ndim - 3)
  return jnp.pad(x, wide).reshape(*x.shape[:2], -1, size, *x.shape[3:])


def from_chunks(
  x: Float[Array, "B K C W"], chunk: int, length: int
) -> Float[Array, "B K T"]:
  """The first `length` slots of chunks that may have a few more each."""
  x = x[..., : _size(chunk, length)]
  return x.reshape(*x.shape[:2], -1)[..., :length]


def _size(chunk: int, length: int) -> int:
  return min(chunk, length) if chunk else length


def identity(heads: int, dim: int) -> Float[Array, "K D D"]:
  """The factor of each head that leaves its keys as they are."""
  eye = jnp.eye(dim, dtype=jnp.float32)
  return jnp.broadcast_to(eye, (heads, dim, dim))


def near_mean(
  keys: Float[Array, "B K C W D"], there: Bool[Array, "B K C W"]
) -> Float[Array, "B K C D"]:
  """The mean of some of the held keys of each chunk; zero if none is seen.

  Subtracted from keys, it keeps what they have in common from drowning in
  rounding what they have not.
  """
  slots = there.shape[-1]
  starts = [slots * place // _PLACES for place in range(_PLACES)]

  def some(x: Shaped[Array, "B K C W *D"]) -> Shaped[Array, "B K C S *D"]:
    places = [x[:, :, :, start : start + _NEAR] for start in starts]
    return jnp.concatenate(places, axis=3)

  use = some(there)
  seen = jnp.where(use[..., None], some(keys).astype(jnp.float32), 0.0)
  count = jnp.sum(use.astype(jnp.float32), axis=-1, keepdims=True)
  return jnp.sum(seen, axis=3) / jnp.maximum(count, 1.0)


def centered(
  projected: Float[Array, "B K C k W"],
  total: Float[Array, "B K C k"],
  moment: Float[Array, "B K C k k"],
  there: Bool[Array, "B K C S"],
) -> Sketch:
  """The centered sketch, from columns about a point near their mean.

  Args:
    projected: the columns.
    total: their sums over held slots.
    moment: sums of their outer products.
    there: held slots.
  """
  count = jnp.sum(there.astype(jnp.float32), axis=-1)[..., None]
  mean = total / jnp.maximum(count, 1.0)
  outer = mean[..., :, None] * mean[..., None, :]
  return Sketch(projected, mean, moment - count[..., None] * outer)
