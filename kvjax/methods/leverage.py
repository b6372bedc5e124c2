"""Statistical leverage of keys, exact or from a sketch."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.kernels.sketch import from_chunks, leverage_rows, sketch

Solver = Literal["svd", "qr", "eig", "chol"]
Factor = Literal["gaussian", "srht", "none"]

_EIG_FLOOR = 1e-6
_CHOL_JITTER = 1e-2


def draw_factors(
  kind: Factor, key: Array, heads: int, dim: int, width: int
) -> Float[Array, "K D k"] | None:
  """An independent factor for every KV head; None for keys as they are."""
  if kind == "none":
    return None
  draw = gaussian_sketch if kind == "gaussian" else hadamard_sketch
  keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(heads))
  return jax.vmap(lambda head: draw(head, dim, width))(keys)


def gaussian_sketch(key: Array, dim: int, width: int) -> Float[Array, "D k"]:
  """Independent normals of variance 1 / width."""
  return jax.random.normal(key, (dim, width)) * width**-0.5


def hadamard_sketch(key: Array, dim: int, width: int) -> Float[Array, "D k"]:
  """Subsampled randomised Hadamard transform: random signs, then columns.

  Entries are ±1 / sqrt(k), so that norms are kept on average. Dimensions are
  padded with zeros to a power of two, which are then dropped.
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
  held: Bool[Array, "B K T"],
  factor: Float[Array, "K D k"] | None,
  solver: Solver,
  center: bool,
  chunk: int = 0,
) -> Float[Array, "B K T"]:
  """Squared row norms of an orthonormal basis of the (sketched) keys.

  Args:
    keys: may be anything where nothing is held.
    held: slots that hold a token.
    factor: right factor of each head; None takes the keys as they are.
    solver: "svd" drops directions of the Gram matrix that are rounding noise;
      "eig" lifts its eigenvalues to 1e-6; "chol" adds 1e-2 to its diagonal;
      "qr" orthogonalises the rows themselves.
    center: subtract the mean key first.
    chunk: keys of a chunk, each of which stands alone; 0 is all keys.

  Returns:
    Scores in [0, 1] that sum to the rank of a chunk; zero where nothing is
    held.
  """
  sketched = sketch(keys, held, factor, chunk, center)
  if solver == "qr":
    basis = jnp.linalg.qr(sketched.rows(held, chunk))[0]
    rows = from_chunks(jnp.sum(basis * basis, axis=-1), chunk, held.shape[2])
    return jnp.where(held, rows, 0.0)
  whitener = _whitener(sketched.gram, solver)
  return leverage_rows(sketched, whitener, held, chunk)


def _whitener(
  gram: Float[Array, "*B k k"], solver: Solver
) -> Float[Array, "*B k k"]:
  """Matrices whose transpose times themselves is the inverse of `gram`."""
  if solver == "chol":
    eye = jnp.broadcast_to(jnp.eye(gram.shape[-1]), gram.shape)
    factor = jnp.linalg.cholesky(gram + _CHOL_JITTER * eye)
    return jax.scipy.linalg.solve_triangular(factor, eye, lower=True)
  values, vectors = jnp.linalg.eigh(gram)
  scale = jnp.sqrt(_inverse(values, solver))
  return scale[..., None] * jnp.swapaxes(vectors, -1, -2)


def _inverse(
  values: Float[Array, "*B k"], solver: Solver
) -> Float[Array, "*B k"]:
  if solver == "eig":
    return 1.0 / jnp.maximum(values, _EIG_FLOOR)
  largest = jnp.max(values, axis=-1, keepdims=True)
  noise = values.shape[-1] * jnp.finfo(jnp.float32).eps * largest
  real = values > jnp.maximum(noise, 1e-12)
  return jnp.where(real, 1.0 / jnp.where(real, values, 1.0), 0.0)
