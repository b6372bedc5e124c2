"""Sketches of keys with their Gram matrices, and leverage scores from them."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.kernels.chunks import from_chunks
from kvjax.kernels.dispatch import dispatch
from kvjax.kernels.programs import Programs
from kvjax.kernels.sketch import xla
from kvjax.kernels.sketch.sketched import Sketch

_SKETCH = Programs.of(xla.sketch)
_ROWS = Programs.of(xla.leverage_rows)


def sketch(
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  factor: Float[Array, "K D k"] | None,
  chunk: int,
  center: bool,
) -> Sketch:
  """Multiplies keys by a factor and sums the outer products of the results.

  All arithmetic is float32 at full precision. Chunks are independent.

  Args:
    keys: float32 or bfloat16; may be NaN in empty slots.
    valid: slots with a token; all others are ignored.
    factor: float32 matrix of each head; None means the identity.
    chunk: slots per chunk; 0, or a number above T, means all slots. The last
      chunk may be shorter and is padded with columns of zeros.
    center: subtract the mean of a chunk's valid keys from each of them.
  """
  return dispatch(
    _SKETCH,
    (keys, valid, factor),
    ("BK", "BK", "K"),
    Sketch("BK", "BK", "BK"),  # type: ignore[arg-type]
    chunk=chunk,
    center=center,
  )


def leverage_rows(
  sketched: Sketch,
  whitener: Float[Array, "B K C k k"],
  valid: Bool[Array, "B K T"],
  chunk: int,
) -> Float[Array, "B K T"]:
  """Computes the squared length of `whitener` times each sketched key.

  These are leverage scores if the whitener's transpose times the whitener is
  the inverse of the Gram matrix.

  Args:
    sketched: the result of `sketch`.
    whitener: float32 matrix of each chunk.
    valid: as given to `sketch`; all other slots get zero.
    chunk: as given to `sketch`.
  """
  rows = dispatch(
    _ROWS,
    (sketched.projected, sketched.mean, whitener),
    ("BK", "BK", "BK"),
    "BK",
  )
  return jnp.where(valid, from_chunks(rows, chunk, valid.shape[2]), 0.0)
