"""Statistical leverage of keys, exact or from a sketch."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.kernels.sketch import by_chunk, from_chunks, leverage_rows, sketch

Solver = Literal["svd", "qr", "eig", "chol"]
Factor = Literal["gaussian", "srht", "none"]

_EPS = float(jnp.finfo(jnp.float32).eps)
_CHOL_JITTER = 1e-2


def draw_factors(
  kind: Factor, key: Array, heads: int, dim: int, width: int
) -> Float[Array, "K D k"] | None:
  """Draws an independent factor for every KV head; None for no sketch."""
  if kind == "none":
    return None
  draw = gaussian_sketch if kind == "gaussian" else hadamard_sketch
  keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(heads))
  return jax.vmap(lambda head: draw(head, dim, width))(keys)


def gaussian_sketch(key: Array, dim: int, width: int) -> Float[Array, "D k"]:
  """Draws independent normals of variance 1 / width."""
  return jax.random.normal(key, (dim, width)) * width**-0.5


def hadamard_sketch(key: Array, dim: int, width: int) -> Float[Array, "D k"]:
  """Draws a subsampled randomized Hadamard transform.

  Entries are ±1 / sqrt(k), so that norms are preserved on average. Dimensions
  are padded with zeros to a power of two; the padding is then dropped.
  """
  size = 1 << (dim - 1).bit_length()
  sign_key, column_key = jax.random.split(key)
  signs = jax.random.rademacher(sign_key, (dim,), dtype=jnp.float32)
  columns = jax.random.choice(
    column_key, size, (min(width, size),), replace=False
  )
  rows = jnp.arange(dim)[:, None]
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

  A direction counts as rounding noise if its eigenvalue in the k x k Gram
  matrix, or its singular value for "qr", is at most k float32 epsilons times
  the largest. Scores of a chunk that differ only by rounding, as those of
  linearly independent keys, which are all 1, are set to their mean.

  Args:
    keys: the keys; arbitrary in empty slots.
    valid: slots that contain a token.
    factor: right factor of each head; None does not sketch. All factors of full
      row rank give the same leverages up to rounding, except for "chol".
    solver: "svd" drops directions of the Gram matrix that are rounding noise;
      "eig" raises their eigenvalues to the noise threshold; "qr" orthogonalizes
      the rows themselves and drops noise; "chol" adds 1e-2 to the diagonal of
      the Gram matrix, and ten times more until it is positive definite.
    center: subtract the mean key first.
    chunk: keys per chunk, which are independent; 0 for a single chunk.

  Returns:
    Scores in [0, 1]. They sum to the numerical rank of a chunk, or to less with
    "eig" and "chol"; zero in empty slots.
  """
  sketched = sketch(keys, valid, factor, chunk, center)
  if solver == "qr":
    squares, rounding = _row_leverage(sketched.rows(valid, chunk))
    rows = from_chunks(squares, chunk, valid.shape[2])
  else:
    whitener, rounding = _whitener(sketched.gram, solver)
    rows = leverage_rows(sketched, whitener, valid, chunk)
  return _remove_rounding(rows, rounding, valid, chunk)


def _row_leverage(
  rows: Float[Array, "*B S k"],
) -> tuple[Float[Array, "*B S"], Float[Array, "*B"]]:
  """Squared row norms of a basis of the rows, and their relative rounding."""
  basis, triangle = jnp.linalg.qr(rows)
  vectors, values, _ = jnp.linalg.svd(triangle, full_matrices=False)
  real = values > _noise(values)
  vectors = jnp.where(real[..., None, :], vectors, 0.0)
  basis = jnp.matmul(basis, vectors, precision="highest")
  return jnp.sum(basis * basis, axis=-1), _rounding(values)


def _whitener(
  gram: Float[Array, "*B k k"], solver: Solver
) -> tuple[Float[Array, "*B k k"], Float[Array, "*B"]]:
  """Matrices whose transpose times themselves is the inverse of `gram`.

  Returns:
    The matrices, and the relative rounding of leverages from them.
  """
  if solver == "chol":
    eye = jnp.broadcast_to(jnp.eye(gram.shape[-1]), gram.shape)
    factor = _cholesky(gram, eye)
    inverse = jax.scipy.linalg.solve_triangular(factor, eye, lower=True)
    values = jnp.linalg.eigvalsh(gram)
    # Differences due to the jitter are real, unless rounding exceeds it.
    hidden_by_rounding = _EPS * jnp.max(values, axis=-1) > _CHOL_JITTER
    return inverse, jnp.where(hidden_by_rounding, _rounding(values), 0.0)
  values, vectors = jnp.linalg.eigh(gram)
  noise = _noise(values)
  if solver == "eig":
    used, real = jnp.maximum(values, noise), noise > 0.0
  else:
    used, real = values, values > noise
  scale = jnp.sqrt(jnp.where(real, 1.0 / jnp.where(real, used, 1.0), 0.0))
  return scale[..., None] * jnp.swapaxes(vectors, -1, -2), _rounding(values)


def _cholesky(
  gram: Float[Array, "*B k k"], eye: Float[Array, "*B k k"]
) -> Float[Array, "*B k k"]:
  """Cholesky factors, each with the smallest jitter that lets it exist."""

  def factorize(jitter: Float[Array, "*B 1 1"]) -> Float[Array, "*B k k"]:
    return jnp.linalg.cholesky(gram + jitter * eye)

  def failed(factor: Float[Array, "*B k k"]) -> Bool[Array, "*B 1 1"]:
    return jnp.any(jnp.isnan(factor), axis=(-2, -1), keepdims=True)

  def raise_jitter(
    state: tuple[Float[Array, "*B 1 1"], Float[Array, "*B k k"]],
  ) -> tuple[Float[Array, "*B 1 1"], Float[Array, "*B k k"]]:
    jitter, factor = state
    jitter = jnp.where(failed(factor), 10 * jitter, jitter)
    return jitter, factorize(jitter)

  jitter = jnp.full((*gram.shape[:-2], 1, 1), _CHOL_JITTER)
  return jax.lax.while_loop(
    lambda state: jnp.any(failed(state[1]) & (state[0] < jnp.inf)),
    raise_jitter,
    (jitter, factorize(jitter)),
  )[1]


def _noise(values: Float[Array, "*B k"]) -> Float[Array, "*B 1"]:
  """The largest eigenvalue, or singular value, that may be rounding."""
  largest = jnp.max(values, axis=-1, keepdims=True)
  return values.shape[-1] * _EPS * largest


def _rounding(values: Float[Array, "*B k"]) -> Float[Array, "*B"]:
  """The relative rounding error of a leverage: at most 1 / k."""
  largest = jnp.max(values, axis=-1)
  real = values > _noise(values)
  smallest = jnp.min(jnp.where(real, values, largest[..., None]), axis=-1)
  return _EPS * largest / jnp.where(smallest > 0.0, smallest, 1.0)


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
  deviations = jnp.where(valid_parts, parts - mean, 0.0)
  spread = jnp.sqrt(
    jnp.sum(deviations * deviations, axis=-1, keepdims=True) / count
  )
  parts = jnp.where(spread <= rounding[..., None] * mean, mean, parts)
  rows = from_chunks(jnp.minimum(parts, 1.0), chunk, valid.shape[2])
  return jnp.where(valid, rows, 0.0)
