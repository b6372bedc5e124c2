"""Sweeps over tiles of logits, row by row, on Hopper GPUs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvjax.kernels import tuning
from kvjax.kernels.attention_mass.tiles import MASKED

# A thread block keeps this many rows and visits this many columns at a time.
# They are not chosen per chip: chunks and the padding are multiples of
# `ROWS`, and the logits of a tile stay in registers.
ROWS, COLUMNS = 128, 64

# Layouts: matrices in shared memory for the tensor cores, and vectors along
# rows or columns in registers.
_TILED = (
  plgpu.TilingTransform((8, 64)),  # type: ignore[abstract]
  plgpu.SwizzleTransform(128),  # type: ignore[abstract]
)
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)


class Pass(NamedTuple):
  """A reduction over the columns of every row.

  Attributes:
    is_visible: whether a row and a column attend to each other, by positions;
      with `row_bound` and `column_bound` as positions, whether any row and
      column of two tiles do.
    row_bound: reduces the positions of a tile of rows.
    column_bound: reduces the positions of a tile of columns.
    start: initial values of a row's carry.
    add: updates the carry from logits and the columns' vectors.
    finish: maps the final carry to the result.
  """

  is_visible: Callable[[Array, Array], Array]
  row_bound: Callable[..., Array]
  column_bound: Callable[..., Array]
  start: tuple[float, ...]
  add: Callable[..., tuple[Array, ...]]
  finish: Callable[..., Array]


def _add_exponentials(
  logits: Float[Array, "R C"],
  largest: Float[Array, " R"],
  total: Float[Array, " R"],
) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
  # While all logits are MASKED, each counts as exp(0) = 1. The first visible
  # one scales this count to 0; without any, `_log_sum_exp` ignores it.
  new_largest = jnp.maximum(largest, jnp.max(logits, axis=1))
  new_terms = jnp.sum(jnp.exp(logits - _across(new_largest)), axis=1)
  return new_largest, total * jnp.exp(largest - new_largest) + new_terms


def _log_sum_exp(
  largest: Float[Array, " R"], total: Float[Array, " R"]
) -> Float[Array, " R"]:
  return jnp.where(largest > MASKED, largest + jnp.log(total), -jnp.inf)


def _add_weights(
  logits: Float[Array, "R C"], lse: Float[Array, " C"], mass: Float[Array, " R"]
) -> tuple[Float[Array, " R"]]:
  return (mass + jnp.sum(jnp.exp(logits - _down(lse)), axis=1),)


# The last query and the first key of two tiles decide if any pair is visible.
LSE = Pass(
  lambda query, key: key <= query,
  jnp.max,
  jnp.min,
  (MASKED, 0.0),
  _add_exponentials,
  _log_sum_exp,
)
MASS = Pass(
  lambda key, query: key <= query,
  jnp.min,
  jnp.max,
  (0.0,),
  _add_weights,
  lambda mass: mass,
)


def sweep(
  kind: Pass,
  rows: Float[Array, "B H R D"],
  columns: Float[Array, "B J C D"],
  row_positions: Int[Array, "B K R"],
  column_positions: Int[Array, "B K C"],
  scale: float,
  chunk: int,
  *vectors: Float[Array, "B N C"],
) -> Float[Array, "B N P R"]:
  """Reduces the columns of each row, separately for P parts of the columns.

  Either rows have N heads and columns K, or the reverse.
  """
  batch, _, length, dim = rows.shape
  heads = max(rows.shape[1], columns.shape[1])
  tiles = length // ROWS
  begin, end = _ends(kind, row_positions, column_positions, chunk)
  # Blocks per head that keep a GPU busy. With fewer tiles of rows, the columns
  # are split into parts.
  blocks = tuning.option("attention_mass/gpu", "blocks")
  # Callers pad columns to ROWS, a multiple of COLUMNS.
  parts = max(1, min(blocks // tiles, columns.shape[2] // COLUMNS))

  def kernel(
    rows: Any,
    columns: Any,
    row_positions: Any,
    column_positions: Any,
    begin: Any,
    end: Any,
    *rest: Any,
  ) -> None:
    *vectors, partial, row_tile, result, barrier = rest
    b = jax.lax.axis_index("row")
    n = jax.lax.axis_index("head")
    i, part = jax.lax.axis_index("tile"), jax.lax.axis_index("part")

    # Arrays have N or K heads; query head n reads KV head n // (N / K).
    def of(x: Any) -> Array:
      return jax.lax.div(n, jnp.int32(heads // x.shape[1]))

    row_slice = pl.ds(i * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(rows.at[b, of(rows), row_slice], row_tile, barrier)
    plgpu.barrier_wait(barrier)
    k = of(row_positions)
    positions = plgpu.load(
      row_positions.at[b, k, row_slice], layout=_BY_ROW, optimized=False
    )
    first, stop = begin[b, k, i], end[b, k, i]
    share = jax.lax.div(stop - first + (parts - 1), jnp.int32(parts))
    first = jnp.minimum(first + part * share, stop)
    stop = jnp.minimum(first + share, stop)

    def step(_: Any, columns: Any, *rest: Any) -> tuple[Array, ...]:
      *vectors, carry = rest

      def dot(sums: Any) -> Array:
        plgpu.wgmma(sums, row_tile, columns.transpose((1, 0)))
        return sums[...]

      sums = plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32)
      logits = pl.run_scoped(dot, sums) * scale
      theirs, *vectors = (
        plgpu.load(x, layout=_BY_COLUMN, optimized=False) for x in vectors
      )
      # From here on the pipeline may overwrite the tiles that were read.
      plgpu.commit_smem()
      visible = kind.is_visible(_across(positions), _down(theirs))
      return kind.add(jnp.where(visible, logits, MASKED), *vectors, *carry)

    def column_blocks(x: Any, *tail: int, **options: Any) -> plgpu.BlockSpec:
      """Describes blocks of columns of the array's head."""
      return plgpu.BlockSpec(
        (None, None, COLUMNS, *tail),
        lambda j: (b, of(x), first + j, *(0 for _ in tail)),
        **options,
      )

    # The range of tiles depends on the data, so the grid is one per block.
    carry = plgpu.emit_pipeline(
      step,
      grid=(stop - first,),
      in_specs=[
        column_blocks(columns, dim, transforms=_TILED),
        *map(column_blocks, (column_positions, *vectors)),
      ],
      max_concurrent_steps=2,
      init_carry=tuple(
        plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), _BY_ROW)
        for x in kind.start
      ),
    )(columns, column_positions, *vectors)
    result[...] = kind.finish(*carry)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(result, partial.at[b, n, part, row_slice])
    plgpu.wait_smem_to_gmem(0)

  return plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((batch, heads, parts, length), jnp.float32),
    grid=(heads, tiles, batch, parts),
    grid_names=("head", "tile", "row", "part"),
    scratch_types=(
      plgpu.SMEM((ROWS, dim), rows.dtype, transforms=_TILED),
      plgpu.SMEM((ROWS,), jnp.float32),
      plgpu.Barrier(),
    ),
    kernel_name="attention_mass",
  )(rows, columns, row_positions, column_positions, begin, end, *vectors)


def _ends(
  kind: Pass,
  row_positions: Int[Array, "B K R"],
  column_positions: Int[Array, "B K C"],
  chunk: int,
) -> tuple[Int[Array, "B K I"], Int[Array, "B K I"]]:
  """Computes the range of column tiles that each tile of rows needs."""
  rows = row_positions.reshape(*row_positions.shape[:2], -1, ROWS)
  columns = column_positions.reshape(*column_positions.shape[:2], -1, COLUMNS)
  needed = kind.is_visible(
    kind.row_bound(rows, axis=-1)[..., None],
    kind.column_bound(columns, axis=-1)[:, :, None],
  )
  index = jnp.arange(columns.shape[2], dtype=jnp.int32)
  if chunk:
    row_chunk = jnp.arange(rows.shape[2], dtype=jnp.int32) * ROWS // chunk
    theirs = index * COLUMNS // chunk
    needed &= (row_chunk[:, None] == theirs[None])[None, None]
  # With positions out of order, needed tiles may have gaps: the range covers
  # them, and masks exclude their logits.
  begin = jnp.min(jnp.where(needed, index, len(index)), axis=-1)
  end = jnp.max(jnp.where(needed, index + 1, 0), axis=-1)
  # If no tile is needed, end is 0: the range is empty, from 0 to 0.
  return jnp.minimum(begin, end), end


def _across(rows: Array) -> Array:
  return jax.lax.broadcast_in_dim(rows, (ROWS, COLUMNS), [0])


def _down(columns: Array) -> Array:
  return jax.lax.broadcast_in_dim(columns, (ROWS, COLUMNS), [1])
