"""Statistical leverage of keys, exact or from a sketch."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from kvjax import openblas
from kvjax.kernels.chunks import by_chunk, from_chunks
from kvjax.kernels.sketch import leverage_rows, sketch

Solver = Literal["svd", "qr", "eig", "chol"]
Factor = Literal["gaussian", "srht", "none"]

_EPS = float(jnp.finfo(jnp.float32).eps)
_CHOL_JITTER = 1e-2


def draw_factors(
  kind: Factor, key: PRNGKeyArray, heads: int, dim: int, width: int
) -> Float[Array, "K D k"] | None:
  """Draws an independent factor for every KV head; None for no sketch."""
  if kind == "none":
    return None
  draw = gaussian_sketch if kind == "gaussian" else hadamard_sketch
  keys = jax.vmap(jax.random.fold_in, (None, 0))(
    key, jnp.arange(heads, dtype=jnp.int32)
  )
  return jax.vmap(lambda head: draw(head, dim, width))(keys)


def gaussian_sketch(
  key: PRNGKeyArray, dim: int, width: int
) -> Float[Array, "D k"]:
  """Draws independent normals of variance 1 / width."""
  return jax.random.normal(key, (dim, width), jnp.float32) * width**-0.5


def hadamard_sketch(
  key: PRNGKeyArray, dim: int, width: int
) -> Float[Array, "D k"]:
  """Draws a subsampled randomized Hadamard transform.

  Entries are ±1 / sqrt(k), so that norms are preserved on average. Dimensions
  are padded with zeros to a power of two; the padding is then dropped.
  """
  size = 1 << (dim - 1).bit_length()
  sign_key, column_key = jax.random.split(key)
  # Not `rademacher`, which draws wider numbers, and so others, in 64-bit mode.
  positive = jax.random.bernoulli(sign_key, jnp.float32(0.5), (dim,))
  signs = jnp.where(positive, 1.0, -1.0).astype(jnp.float32)
  columns = jax.random.choice(
    column_key, size, (min(width, size),), replace=False
  ).astype(jnp.int32)
  rows = jnp.arange(dim, dtype=jnp.int32)[:, None]
  # Entry (i, j) of the Walsh-Hadamard matrix is -1 to the bits i and j share.
  shared = jax.lax.population_count(rows & columns[None]) % 2
  hadamard = 1.0 - 2.0 * shared.astype(jnp.float32)
  return signs[:, None] * hadamard * len(columns) ** -0.5


def leverage(
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  factor: Float[Array, "K D k"] | None,
  solver: Solver,
  center: bool,
  chunk: int = 0,
) -> Float[Array, "B K T"]:
  """Computes squared row norms of an orthonormal basis of the (sketched) keys.

  Except for "chol", a direction counts as rounding noise if its singular value
  is at most sqrt(k) float32 epsilons times the Frobenius norm of the sketched
  keys. Scores of a chunk that differ only by rounding, as those of linearly
  independent keys, which are all 1, are set to their mean.

  "svd" and "eig" use a Gram matrix, whose condition is the square of the keys'.
  They whiten the keys by its Cholesky factor first and take the eigenvalues of
  the Gram matrix of the result, as shifted CholeskyQR does (Fukaya et al.,
  arXiv 1809.11085). Errors are then proportional to the condition of the keys,
  as in a QR decomposition, which is much slower.

  Args:
    keys: the keys; arbitrary in empty slots.
    valid: slots that contain a token.
    factor: right factor of each head; None does not sketch. Factors of D
      columns or more are ignored, since they do not change the leverage, except
      by "chol".
    solver: "svd" drops directions that are rounding noise; "eig" raises their
      eigenvalues to the noise threshold; "qr" orthogonalizes the rows
      themselves and drops noise; "chol" is that of kvpress: it adds 1e-2 to the
      diagonal of the Gram matrix, whatever the scale of the keys, and ten times
      more until it is positive definite.
    center: subtract the mean key first.
    chunk: keys per chunk, which are independent; 0 for a single chunk.

  Returns:
    Scores in [0, 1]. They sum to the numerical rank of a chunk, or to less with
    "chol"; zero in empty slots.
  """
  openblas.load()
  # A longer chunk would only be padded.
  chunk = chunk if chunk < keys.shape[2] else 0
  if factor is not None and factor.shape[2] >= factor.shape[1]:
    factor = factor if solver == "chol" else None
  sketched = sketch(keys, valid, factor, chunk, center)
  if solver == "qr":
    squares, rounding = _row_leverage(sketched.rows(valid, chunk))
    rows = from_chunks(squares, chunk, valid.shape[2])
  else:
    if solver == "chol":
      whitener, rounding = _cholesky_whitener(sketched.gram)
    else:
      factors, relative_shift = _shifted_cholesky(sketched.gram)
      sketched = sketched.transformed(_invert(factors), valid, chunk)
      whitener, rounding = _eigen_whitener(
        sketched.gram, relative_shift, clamp=solver == "eig"
      )
    rows = leverage_rows(sketched, whitener, valid, chunk)
  return _remove_rounding(rows, rounding, valid, chunk)


def _row_leverage(
  rows: Float[Array, "*B S k"],
) -> tuple[Float[Array, "*B S"], Float[Array, "*B"]]:
  """Squared row norms of a basis of the rows, and their relative rounding."""
  basis, triangle = jnp.linalg.qr(rows)
  # With R = U S V^T, Q U is a basis whose directions have singular values S,
  # so that those of noise can be dropped.
  vectors, values, _ = jnp.linalg.svd(triangle, full_matrices=False)
  norm = jnp.linalg.norm(values, axis=-1, keepdims=True)
  real = values > rows.shape[-1] ** 0.5 * _EPS * norm
  vectors = jnp.where(real[..., None, :], vectors, 0.0)
  basis = jnp.matmul(basis, vectors, precision="highest")
  smallest = jnp.min(jnp.where(real, values, norm), axis=-1)
  rounding = _EPS * norm[..., 0] / jnp.where(smallest > 0.0, smallest, 1.0)
  return jnp.sum(basis * basis, axis=-1), rounding


def _shifted_cholesky(
  gram: Float[Array, "*B k k"],
) -> tuple[Float[Array, "*B k k"], Float[Array, "*B"]]:
  """Cholesky factors of Gram matrices, shifted by what may be rounding.

  Returns:
    The factors, and the shifts relative to the traces, above 0.
  """
  diagonal = jnp.diagonal(gram, axis1=-2, axis2=-1)
  largest = jnp.max(diagonal, axis=-1)
  # Between one and k epsilons of the largest eigenvalue.
  shift = gram.shape[-1] * _EPS * jnp.where(largest > 0.0, largest, 1.0)
  factors, shift = _cholesky(gram, shift)
  trace = jnp.sum(diagonal, axis=-1)
  return factors, shift / jnp.where(trace > 0.0, trace, 1.0)


def _eigen_whitener(
  gram: Float[Array, "*B k k"], relative_shift: Float[Array, "*B"], clamp: bool
) -> tuple[Float[Array, "*B k k"], Float[Array, "*B"]]:
  """Whiteners of columns that `_shifted_cholesky` has whitened in part.

  A singular value x of the sketched keys has become the eigenvalue
  x^2 / (x^2 + shift).

  Args:
    gram: Gram matrix of these columns.
    relative_shift: the shift over the sum of all x^2.
    clamp: raise eigenvalues that are noise to the threshold, instead of
      dropping their directions.

  Returns:
    The matrices, and the relative rounding of leverages from them.
  """
  values, vectors = jnp.linalg.eigh(gram)
  # At the threshold, x^2 is k eps^2 times the sum of all x^2. That is far
  # below the shift, so its eigenvalue is x^2 / shift.
  noise = (gram.shape[-1] * _EPS**2 / relative_shift)[..., None]
  real = values > noise
  used = jnp.where(real, values, noise)
  scale = jnp.where(real | clamp, used**-0.5, 0.0)
  smallest = jnp.min(jnp.where(real, values, 1.0), axis=-1)
  # The condition of the keys, from what the shift took from `smallest`.
  # lost / smallest is the sum of all x^2 over the smallest x^2.
  lost = jnp.maximum((1.0 - smallest) / relative_shift, 1.0)
  rounding = _EPS * jnp.sqrt(lost / smallest)
  return scale[..., None] * jnp.swapaxes(vectors, -1, -2), rounding


def _cholesky_whitener(
  gram: Float[Array, "*B k k"],
) -> tuple[Float[Array, "*B k k"], Float[Array, "*B"]]:
  """Whiteners by kvpress's jitter, and the relative rounding of leverages."""
  factors, _ = _cholesky(
    gram, jnp.full(gram.shape[:-2], _CHOL_JITTER, gram.dtype)
  )
  values = jnp.linalg.eigvalsh(gram)
  largest = jnp.max(values, axis=-1, keepdims=True)
  real = values > gram.shape[-1] * _EPS * largest
  smallest = jnp.min(jnp.where(real, values, largest), axis=-1)
  rounding = _EPS * largest[..., 0] / jnp.where(smallest > 0.0, smallest, 1.0)
  # Differences due to the jitter are real, unless rounding exceeds it.
  hidden = _EPS * largest[..., 0] > _CHOL_JITTER
  return _invert(factors), jnp.where(hidden, rounding, 0.0)


def _invert(factors: Float[Array, "*B k k"]) -> Float[Array, "*B k k"]:
  """Inverts lower triangular matrices."""
  return jax.scipy.linalg.solve_triangular(factors, _eye(factors), lower=True)


def _eye(like: Float[Array, "*B k k"]) -> Float[Array, "*B k k"]:
  return jnp.broadcast_to(jnp.eye(like.shape[-1], dtype=like.dtype), like.shape)


def _cholesky(
  gram: Float[Array, "*B k k"], jitter: Float[Array, "*B"]
) -> tuple[Float[Array, "*B k k"], Float[Array, "*B"]]:
  """Cholesky factors with jitter on the diagonal, and the jitter of each.

  The jitter is multiplied by ten until the factor exists.
  """

  def factorize(jitter: Float[Array, "*B"]) -> Float[Array, "*B k k"]:
    return jnp.linalg.cholesky(gram + jitter[..., None, None] * _eye(gram))

  def failed(factors: Float[Array, "*B k k"]) -> Bool[Array, "*B"]:
    return jnp.any(jnp.isnan(factors), axis=(-2, -1))

  def raise_jitter(
    state: tuple[Float[Array, "*B k k"], Float[Array, "*B"]],
  ) -> tuple[Float[Array, "*B k k"], Float[Array, "*B"]]:
    factors, jitter = state
    # All matrices are factorized again; those that have a factor keep theirs.
    jitter = jnp.where(failed(factors), 10 * jitter, jitter)
    return factorize(jitter), jitter

  return jax.lax.while_loop(
    # Keys that are NaN never have a factor; an infinite jitter ends the loop.
    lambda state: jnp.any(failed(state[0]) & (state[1] < jnp.inf)),
    raise_jitter,
    (factorize(jitter), jitter),
  )


def _remove_rounding(
  rows: Float[Array, "B K T"],
  rounding: Float[Array, "B K C"],
  valid: Bool[Array, "B K T"],
  chunk: int,
) -> Float[Array, "B K T"]:
  """Clips leverages to 1 and makes those equal that differ only by rounding.

  Args:
    rows: leverages as computed; arbitrary in empty slots.
    rounding: relative rounding error of each chunk.
    valid: slots that contain a token.
    chunk: slots per chunk; 0 for a single chunk.
  """
  parts, valid_parts = by_chunk(rows, chunk), by_chunk(valid, chunk)
  count = jnp.sum(valid_parts.astype(jnp.float32), axis=-1, keepdims=True)
  count = jnp.maximum(count, 1.0)
  mean = (
    jnp.sum(jnp.where(valid_parts, parts, 0.0), axis=-1, keepdims=True) / count
  )
  # Two passes, as the mean square minus the squared mean would cancel.
  deviations = jnp.where(valid_parts, parts - mean, 0.0)
  spread = jnp.sqrt(
    jnp.sum(deviations * deviations, axis=-1, keepdims=True) / count
  )
  parts = jnp.where(spread <= rounding[..., None] * mean, mean, parts)
  rows = from_chunks(jnp.minimum(parts, 1.0), chunk, valid.shape[2])
  return jnp.where(valid, rows, 0.0)
