"""Statistical leverage of keys, exact or from a sketch."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Solver = Literal["svd", "qr", "eig", "chol"]
Sketch = Literal["gaussian", "srht", "none"]

_EIG_FLOOR = 1e-6
_CHOL_JITTER = 1e-2


def draw_sketches(
  kind: Sketch, key: Array, heads: int, dim: int, width: int
) -> Float[Array, "K D k"] | None:
  """An independent sketch for every KV head; None for keys as they are."""
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
  keys: Float[Array, "T D"],
  held: Bool[Array, " T"],
  sketch: Float[Array, "D k"] | None,
  solver: Solver,
  center: bool,
) -> Float[Array, " T"]:
  """Squared row norms of an orthonormal basis of the (sketched) keys.

  Args:
    keys: float32, zero where nothing is held.
    held: slots that hold a token.
    sketch: right factor; None takes the keys as they are.
    solver: "svd" drops directions of the Gram matrix that are rounding noise;
      "eig" lifts its eigenvalues to 1e-6; "chol" adds 1e-2 to its diagonal;
      "qr" orthogonalises the rows themselves.
    center: subtract the mean key first.

  Returns:
    Scores in [0, 1] that sum to the rank; zero where nothing is held.
  """
  x = keys if sketch is None else keys @ sketch
  if center:
    count = jnp.maximum(jnp.sum(held.astype(jnp.float32)), 1.0)
    x = x - jnp.sum(x, axis=0, keepdims=True) / count
  x = jnp.where(held[:, None], x, 0.0)
  if solver == "qr":
    basis = jnp.linalg.qr(x)[0]
    return jnp.where(held, jnp.sum(basis * basis, axis=1), 0.0)
  gram = x.T @ x
  if solver == "chol":
    jitter = _CHOL_JITTER * jnp.eye(len(gram))
    factor = jnp.linalg.cholesky(gram + jitter)
    whitened = jax.scipy.linalg.solve_triangular(factor, x.T, lower=True)
    return jnp.sum(whitened * whitened, axis=0)
  values, vectors = jnp.linalg.eigh(gram)
  projected = x @ vectors
  return jnp.sum(projected * projected * _inverse(values, solver)[None], axis=1)


def chunked_leverage(
  keys: Float[Array, "T D"],
  held: Bool[Array, " T"],
  sketch: Float[Array, "D k"] | None,
  solver: Solver,
  center: bool,
  size: int,
) -> Float[Array, " T"]:
  """As `leverage`, for each chunk of `size` keys by itself; 0 is all keys."""
  if size == 0:
    return leverage(keys, held, sketch, solver, center)
  length, dim = keys.shape
  extra = -length % size
  parts = jnp.pad(keys, ((0, extra), (0, 0))).reshape(-1, size, dim)
  held = jnp.pad(held, (0, extra)).reshape(-1, size)
  per_chunk = jax.vmap(lambda x, h: leverage(x, h, sketch, solver, center))
  return per_chunk(parts, held).reshape(-1)[:length]


def _inverse(values: Float[Array, " k"], solver: Solver) -> Float[Array, " k"]:
  if solver == "eig":
    return 1.0 / jnp.maximum(values, _EIG_FLOOR)
  noise = len(values) * jnp.finfo(jnp.float32).eps * jnp.max(values)
  real = values > jnp.maximum(noise, 1e-12)
  return jnp.where(real, 1.0 / jnp.where(real, values, 1.0), 0.0)
