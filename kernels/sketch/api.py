"""Sketched keys with their Gram matrices, and leverage from them."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.kernels.dispatch import Implementation, Programs, dispatch
from kvjax.kernels.sketch import gpu, tpu, xla
from kvjax.kernels.sketch.sketched import Sketch, from_chunks

_SKETCH = Programs(xla.sketch, tpu.sketch, gpu.sketch)
_ROWS = Programs(xla.leverage_rows, tpu.leverage_rows, gpu.leverage_rows)


def sketch(
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  factor: Float[Array, "K D k"] | None,
  chunk: int,
  center: bool,
  implementation: Implementation | None = None,
) -> Sketch:
  """Multiplies keys by a factor and sums the outer products of the results.

  Everything is float32 and as exact as that allows. Each chunk stands alone.

  Args:
    keys: float32 or bfloat16; may be NaN where nothing is held.
    valid: slots that hold a token; the others count for nothing.
    factor: of each head, float32; None takes the keys as they are.
    chunk: slots per chunk; 0, or more than there are, is all slots. The last
      chunk may be shorter, with columns of zeros after it.
    center: subtract the mean of a chunk's held keys from each.
    implementation: see `kvjax.kernels.use`.
  """
  return dispatch(
    _SKETCH,
    implementation,
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
  implementation: Implementation | None = None,
) -> Float[Array, "B K T"]:
  """Squared lengths of `whitener` times each sketched key.

  They are leverages where the transpose of the whitener times the whitener is
  the inverse of the Gram matrix.

  Args:
    sketched: what `sketch` answered.
    whitener: of each chunk, float32.
    valid: as given to `sketch`; the others get zero.
    chunk: likewise.
    implementation: see `kvjax.kernels.use`.
  """
  rows = dispatch(
    _ROWS,
    implementation,
    (sketched.projected, sketched.mean, whitener),
    ("BK", "BK", "BK"),
    "BK",
  )
  return jnp.where(valid, from_chunks(rows, chunk, valid.shape[2]), 0.0)
