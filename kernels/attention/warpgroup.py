"""Online softmax on a Hopper warpgroup: 64 queries, 64 slots at a time.

The matrix units multiply at least 64 rows, so queries are padded to 64. The
units read keys and values from swizzled shared memory. Rows pass through
registers on their way there, where empty slots are zeroed and eight bits are
converted to sixteen.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.partial import Partial

# Queries per tile, and slots per chunk: the fewest rows that the matrix units
# multiply, a fact of the hardware.
ROWS = 64
# Register layouts of matrices, and of vectors along their rows and columns.
MATRIX = plgpu.Layout.WGMMA
OF_ROWS = MATRIX.reduce(1)
OF_COLUMNS = MATRIX.reduce(0)
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


class PartialSums(NamedTuple):
  """The state of an online softmax, as refs or as float32 arrays.

  Attributes:
    weighted: sum of the values weighted by exp(logit - largest), [..., S, D].
    largest: largest logit of each query, -inf without visible keys, [..., S].
    total: sum of exp(logit - largest), [..., S].
  """

  weighted: Any
  largest: Any
  total: Any

  @classmethod
  def none(cls, dim: int) -> "PartialSums":
    """Returns the state before the first key, in registers."""

    # A loop's carry must begin in the layout that its body returns.
    def full(shape: tuple[int, ...], value: float, layout: Any) -> Array:
      return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    return cls(
      full((ROWS, dim), 0.0, MATRIX),
      full((ROWS,), -jnp.inf, OF_ROWS),
      full((ROWS,), 0.0, OF_ROWS),
    )

  @classmethod
  def shapes(
    cls, lead: tuple[int, ...], queries: int, dim: int
  ) -> "PartialSums":
    """Returns the output shapes for a grid of `lead` thread blocks."""
    return cls(
      jax.ShapeDtypeStruct((*lead, queries, dim), jnp.float32),
      # Vectors keep their padding, a whole tile; `joined` drops it.
      jax.ShapeDtypeStruct((*lead, ROWS), jnp.float32),
      jax.ShapeDtypeStruct((*lead, ROWS), jnp.float32),
    )

  def joined(self, dtype: DTypeLike) -> Partial:
    """Merges the parts, the axis before the queries, into one result.

    Args:
      dtype: of the output.
    """
    queries = self.weighted.shape[-2]
    parts, total = self.largest[..., :queries], self.total[..., :queries]
    largest = jnp.max(parts, axis=-2, keepdims=True)
    shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
    # A part of which nothing is visible has -inf and gets a share of 0.
    share = jnp.exp(parts - shift)
    return Partial.of(
      jnp.squeeze(largest, -2),
      jnp.sum(total * share, axis=-2),
      jnp.sum(self.weighted * share[..., None], axis=-3),
      dtype,
    )


class Tiles(NamedTuple):
  """Shared memory of a thread block; two blocks fit on a multiprocessor.

  Attributes:
    queries: queries in the layout of the matrix units.
    rows: double-buffered chunks of keys and of values in their stored dtype;
      reused at the end for the weighted output.
    tile: keys, then values, in the layout of the matrix units.
    weights: attention weights in the same layout.
    largest: staging buffer for `PartialSums.largest`.
    total: staging buffer for `PartialSums.total`.
    arrived: barrier for the copies of a chunk.
    ready: barrier for the queries' copy.
  """

  queries: Any
  rows: Any
  tile: Any
  weights: Any
  largest: Any
  total: Any
  arrived: Any
  ready: Any

  @classmethod
  def types(cls, dim: int, dtype: DTypeLike, stored: DTypeLike) -> "Tiles":
    """Returns the types to allocate.

    Args:
      dim: D.
      dtype: 16-bit dtype of queries and products.
      stored: dtype of keys and values in memory.
    """
    tile = plgpu.SMEM((ROWS, dim), dtype, transforms=_swizzled(dtype))
    square = plgpu.SMEM((ROWS, ROWS), dtype, transforms=_swizzled(dtype))
    rows = plgpu.SMEM((2, ROWS, dim), stored, transforms=_swizzled(stored))
    vector = plgpu.SMEM((ROWS,), jnp.float32)
    return cls(
      tile,
      # Rows and output share memory, which lets two blocks fit.
      plgpu.RefUnion((rows, rows), plgpu.SMEM((ROWS, dim), jnp.float32)),
      tile,
      square,
      vector,
      vector,
      # A chunk's keys and values.
      plgpu.Barrier(num_arrivals=2, num_barriers=2),
      plgpu.Barrier(num_arrivals=1),
    )


def _swizzled(dtype: DTypeLike) -> tuple[Any, ...]:
  """Returns transforms to tiles of 8 x 128 bytes, without bank conflicts."""
  tile = (8, 128 // jnp.dtype(dtype).itemsize)
  return (
    plgpu.TilingTransform(tile),  # type: ignore[abstract]
    plgpu.SwizzleTransform(128),  # type: ignore[abstract]
  )


def along_rows(x: Array) -> Array:
  """Broadcasts one number per row to a tile."""
  return jax.lax.broadcast_in_dim(x, (ROWS, ROWS), (0,))


def along_columns(x: Array) -> Array:
  """Broadcasts one number per column to a tile."""
  return jax.lax.broadcast_in_dim(x, (ROWS, ROWS), (1,))


def attend(
  state: PartialSums,
  tiles: Tiles,
  buffer: Int[Array, ""],
  valid: Callable[[Any], Array],
  adjust: Callable[[Float[Array, "S C"]], Float[Array, "S C"]],
  value_scales: Float[Array, " C"] | None,
) -> PartialSums:
  """Updates the online softmax with a chunk that has arrived.

  Args:
    state: the state so far.
    tiles: shared memory with the chunk.
    buffer: which of the two buffers has the chunk.
    valid: returns the mask of non-empty slots in a given layout.
    adjust: turns products of queries and keys into logits, -inf where masked.
    value_scales: dequantization scales of eight-bit values.
  """
  dtype = tiles.queries.dtype
  dim = tiles.queries.shape[1]
  (key_rows, value_rows), _ = tiles.rows

  def rows(ref: Any) -> Array:
    # By default, Mosaic refuses a load that is not fully optimized.
    read = plgpu.load(ref.at[buffer], layout=MATRIX, optimized=False)
    return read.astype(dtype)

  tiles.tile[...] = rows(key_rows)
  # Writes to shared memory must be committed before the matrix units read it.
  plgpu.commit_smem()

  logits = adjust(_product(tiles.queries, tiles.tile.T, ROWS))
  # `_product` has waited for the matrix units, so `tile` may be overwritten.
  values = rows(value_rows)
  if value_scales is None:
    # Empty values may be NaN, and 0 * NaN is NaN; int8 entries never are.
    filled = jax.lax.broadcast_in_dim(valid(OF_ROWS), (ROWS, dim), (0,))
    values = jnp.where(filled, values, jnp.zeros_like(values))
  tiles.tile[...] = values
  largest = jnp.maximum(state.largest, jnp.max(logits, axis=1))
  shift = jnp.where(largest == -jnp.inf, 0.0, largest)
  weights = jnp.exp(logits - along_rows(shift))
  rescale = jnp.exp(state.largest - shift)
  total = state.total * rescale + jnp.sum(weights, axis=1)
  if value_scales is not None:
    # The scale of an empty slot may be NaN, and 0 * NaN is NaN.
    scaled = weights * along_columns(value_scales)
    weights = jnp.where(along_columns(valid(OF_COLUMNS)), scaled, 0.0)

  tiles.weights[...] = weights.astype(dtype)
  # One commit for the values and the weights. It also synchronizes the threads:
  # all have read this buffer, so that the next fetch may overwrite it.
  plgpu.commit_smem()

  rescaled = state.weighted * jax.lax.broadcast_in_dim(
    rescale, (ROWS, dim), (0,)
  )
  weighted = rescaled + _product(tiles.weights, tiles.tile, dim)
  return PartialSums(weighted, largest, total)


def _product(left: Any, right: Any, columns: int) -> Array:
  def run(accumulator: Any) -> Array:
    # Runs in the background; reading the accumulator waits for it.
    plgpu.wgmma(accumulator, left, right)
    return accumulator[...]

  accumulator = plgpu.ACC((ROWS, columns), jnp.float32)  # type: ignore[attr-defined]
  return pl.run_scoped(run, accumulator)


def write(state: PartialSums, tiles: Tiles, to: PartialSums) -> None:
  """Writes the state to global memory, without the padding queries."""
  # No fetch is under way after the last chunk, so the rows may be overwritten.
  _, weighted = tiles.rows
  staged = PartialSums(weighted, tiles.largest, tiles.total)
  for value, ref in zip(state, staged, strict=True):
    _store(ref, value)
  plgpu.commit_smem()
  # Of the 64 rows, the output in global memory has only those of real queries.
  queries = pl.ds(0, to.weighted.shape[0])
  plgpu.copy_smem_to_gmem(weighted.at[queries], to.weighted)
  plgpu.copy_smem_to_gmem(tiles.largest, to.largest)
  plgpu.copy_smem_to_gmem(tiles.total, to.total)
  # Shared memory is gone when the block ends.
  plgpu.wait_smem_to_gmem(0)


def _store(ref: Any, value: Array) -> None:
  """Stores to shared memory where no store is free of bank conflicts."""
  # JAX 0.12 refuses such assignments, and 0.11 has no `store`.
  if hasattr(plgpu, "store"):
    plgpu.store(ref, value, optimized=False)
  else:
    ref[...] = value
