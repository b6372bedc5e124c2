"""Reference sketches and leverage scores, one chunk and head at a time."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.kernels.chunks import by_chunk, from_chunks
from kvjax.kernels.sketch.sketched import Sketch


def sketch_reference(
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  factor: Float[Array, "K D k"] | None,
  chunk: int,
  center: bool,
) -> Sketch:
  """Computes `kvjax.kernels.sketch.api.sketch`, with a mean of zero."""
  parts, chunk_valid = by_chunk(keys, chunk), by_chunk(valid, chunk)
  batch, heads, chunks, _, dim = parts.shape
  columns, grams = [], []
  for b in range(batch):
    for k in range(heads):
      for c in range(chunks):
        mask = chunk_valid[b, k, c, :, None]
        x = jnp.where(mask, parts[b, k, c].astype(jnp.float32), 0.0)
        # The second pass removes the rounding error of the first.
        for _ in range(2 if center else 0):
          count = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
          mean = jnp.sum(x, axis=0) / count
          x = jnp.where(mask, x - mean[None], 0.0)
        if factor is not None:
          x = jnp.matmul(x, factor[k], precision="highest")
        columns.append(x.T)
        grams.append(jnp.matmul(x.T, x, precision="highest"))
  shape = (batch, heads, chunks)
  width = dim if factor is None else factor.shape[-1]
  return Sketch(
    jnp.stack(columns).reshape(*shape, width, -1),
    jnp.zeros((*shape, width), jnp.float32),
    jnp.stack(grams).reshape(*shape, width, width),
  )


def leverage_rows_reference(
  sketched: Sketch,
  whitener: Float[Array, "B K C k k"],
  valid: Bool[Array, "B K T"],
  chunk: int,
) -> Float[Array, "B K T"]:
  """Computes `kvjax.kernels.sketch.api.leverage_rows`."""
  rows = sketched.rows(valid, chunk)
  whitened = jnp.einsum(
    "bkcwe,bkcfe->bkcwf", rows, whitener, precision="highest"
  )
  lengths = jnp.sum(whitened * whitened, axis=-1)
  return from_chunks(lengths, chunk, valid.shape[2])
