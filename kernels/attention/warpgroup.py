"""Online softmax on a Hopper warpgroup: 64 queries, 64 slots at a time.

The matrix units multiply 64 rows at least, so that queries are padded to that.
They read keys and values from shared memory that is laid out for them: rows
pass through registers on their way there, where those of slots that hold
nothing are cleared and eight bits become sixteen.
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

# Queries, and slots of a chunk.
ROWS = 64
# Warpgroups that keep a Hopper card busy: two on each processor.
WARPGROUPS = 264
# How matrices lie in registers, and vectors along their rows and columns.
MATRIX = plgpu.Layout.WGMMA
OF_ROWS = MATRIX.reduce(1)
OF_COLUMNS = MATRIX.reduce(0)
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


class Found(NamedTuple):
  """What an online softmax has found: refs, or float32 arrays.

  Attributes:
    weighted: the values, weighted by exp(logit - largest), [..., S, D].
    largest: largest logit of each query, -inf where no key was seen, [..., S].
    total: sum of exp(logit - largest), [..., S].
  """

  weighted: Any
  largest: Any
  total: Any

  @classmethod
  def none(cls, dim: int) -> "Found":
    """Before the first key, in registers."""

    def full(shape: tuple[int, ...], value: float, layout: Any) -> Array:
      return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    return cls(
      full((ROWS, dim), 0.0, MATRIX),
      full((ROWS,), -jnp.inf, OF_ROWS),
      full((ROWS,), 0.0, OF_ROWS),
    )

  @classmethod
  def shapes(cls, lead: tuple[int, ...], queries: int, dim: int) -> "Found":
    """Of what blocks of threads write, `lead` of them."""
    return cls(
      jax.ShapeDtypeStruct((*lead, queries, dim), jnp.float32),
      jax.ShapeDtypeStruct((*lead, ROWS), jnp.float32),
      jax.ShapeDtypeStruct((*lead, ROWS), jnp.float32),
    )

  def joined(self, dtype: DTypeLike) -> Partial:
    """Attention to all that the parts, the axis before the queries, have seen.

    Args:
      dtype: of the output.
    """
    queries = self.weighted.shape[-2]
    parts, total = self.largest[..., :queries], self.total[..., :queries]
    largest = jnp.max(parts, axis=-2, keepdims=True)
    shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
    share = jnp.exp(parts - shift)
    return Partial.of(
      jnp.squeeze(largest, -2),
      jnp.sum(total * share, axis=-2),
      jnp.sum(self.weighted * share[..., None], axis=-3),
      dtype,
    )


class Tiles(NamedTuple):
  """Shared memory of a block of threads; two blocks fit on a processor.

  Attributes:
    queries: as the matrix units read them.
    rows: two chunks of keys and two of values, as they are stored; in their
      place, at the end, what was found.
    tile: keys, then values, as the matrix units read them.
    weights: of the values, likewise.
    largest: on its way out.
    total: likewise.
    arrived: counts the copies of a chunk.
    ready: counts the copies before the first.
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
  def types(
    cls,
    dim: int,
    dtype: DTypeLike,
    stored: DTypeLike,
    tiled: bool,
    copies: int,
    first: int,
  ) -> "Tiles":
    """What to allocate.

    Args:
      dim: D.
      dtype: of queries and products, 16 bits.
      stored: of keys and values.
      tiled: rows come by tiles, which threads read faster than single rows.
      copies: that fetch a chunk.
      first: copies that come before.
    """
    tile = plgpu.SMEM((ROWS, dim), dtype, transforms=_swizzled(dtype))
    square = plgpu.SMEM((ROWS, ROWS), dtype, transforms=_swizzled(dtype))
    transforms = _swizzled(stored) if tiled else ()
    rows = plgpu.SMEM((2, ROWS, dim), stored, transforms=transforms)
    vector = plgpu.SMEM((ROWS,), jnp.float32)
    return cls(
      tile,
      plgpu.RefUnion((rows, rows), plgpu.SMEM((ROWS, dim), jnp.float32)),
      tile,
      square,
      vector,
      vector,
      plgpu.Barrier(num_arrivals=copies, num_barriers=2),
      plgpu.Barrier(num_arrivals=first),
    )


def _swizzled(dtype: DTypeLike) -> tuple[Any, ...]:
  """Tiles of 8 rows of 128 bytes, without bank conflicts."""
  tile = (8, 128 // jnp.dtype(dtype).itemsize)
  return (
    plgpu.TilingTransform(tile),  # type: ignore[abstract]
    plgpu.SwizzleTransform(128),  # type: ignore[abstract]
  )


def along_rows(x: Array) -> Array:
  """A number for each row of a tile."""
  return jax.lax.broadcast_in_dim(x, (ROWS, ROWS), (0,))


def along_columns(x: Array) -> Array:
  """A number for each column of a tile."""
  return jax.lax.broadcast_in_dim(x, (ROWS, ROWS), (1,))


def attend(
  found: Found,
  tiles: Tiles,
  buffer: Int[Array, ""],
  valid: Callable[[Any], Array],
  adjust: Callable[[Float[Array, "S C"]], Float[Array, "S C"]],
  value_scales: Float[Array, " C"] | None,
) -> Found:
  """Attends to a chunk that has arrived.

  Args:
    found: so far.
    tiles: with the chunk.
    buffer: which of the two chunks.
    valid: for a layout, which slots of the chunk hold anything.
    adjust: makes logits of products of queries and keys, -inf where a query
      does not see a slot.
    value_scales: of values in eight bits.
  """
  dtype = tiles.queries.dtype
  dim = tiles.queries.shape[1]
  (key_rows, value_rows), _ = tiles.rows

  def rows(ref: Any) -> Array:
    read = plgpu.load(ref.at[buffer], layout=MATRIX, optimized=False)
    return read.astype(dtype)

  tiles.tile[...] = rows(key_rows)
  plgpu.commit_smem()

  logits = adjust(_product(tiles.queries, tiles.tile.T, ROWS))
  values = rows(value_rows)
  if value_scales is None:
    own = jax.lax.broadcast_in_dim(valid(OF_ROWS), (ROWS, dim), (0,))
    values = jnp.where(own, values, jnp.zeros_like(values))
  tiles.tile[...] = values
  largest = jnp.maximum(found.largest, jnp.max(logits, axis=1))
  shift = jnp.where(largest == -jnp.inf, 0.0, largest)
  weights = jnp.exp(logits - along_rows(shift))
  shrink = jnp.exp(found.largest - shift)
  total = found.total * shrink + jnp.sum(weights, axis=1)
  if value_scales is not None:
    # Where a weight is 0 the scale may be NaN.
    scaled = weights * along_columns(value_scales)
    weights = jnp.where(along_columns(valid(OF_COLUMNS)), scaled, 0.0)

  tiles.weights[...] = weights.astype(dtype)
  plgpu.commit_smem()

  shrunk = found.weighted * jax.lax.broadcast_in_dim(shrink, (ROWS, dim), (0,))
  weighted = shrunk + _product(tiles.weights, tiles.tile, dim)
  return Found(weighted, largest, total)


def _product(left: Any, right: Any, columns: int) -> Array:
  def run(accumulator: Any) -> Array:
    plgpu.wgmma(accumulator, left, right)
    return accumulator[...]

  accumulator = plgpu.ACC((ROWS, columns), jnp.float32)  # type: ignore[attr-defined]
  return pl.run_scoped(run, accumulator)


def write(found: Found, tiles: Tiles, to: Found) -> None:
  """Hands over what was found, of as many queries as there is room for."""
  _, weighted = tiles.rows
  staged = Found(weighted, tiles.largest, tiles.total)
  for value, ref in zip(found, staged, strict=True):
    plgpu.store(ref, value, optimized=False)
  plgpu.commit_smem()
  queries = pl.ds(0, to.weighted.shape[0])
  plgpu.copy_smem_to_gmem(weighted.at[queries], to.weighted)
  plgpu.copy_smem_to_gmem(tiles.largest, to.largest)
  plgpu.copy_smem_to_gmem(tiles.total, to.total)
  plgpu.wait_smem_to_gmem(0)
