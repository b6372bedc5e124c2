"""Rows of logits and the columns that they see, on Hopper GPUs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention_mass.tiles import UNSEEN

# A block of threads keeps so many rows and meets so many columns at a time.
ROWS, COLUMNS = 128, 64
# Blocks of a head that keep a GPU busy; fewer tiles of rows share out columns.
_BLOCKS = 16

# How matrices lie in shared memory for the tensor cores, and what there is for
# each row or column in registers.
_TILED = (
  plgpu.TilingTransform((8, 64)),  # type: ignore[abstract]
  plgpu.SwizzleTransform(128),  # type: ignore[abstract]
)
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)


class Pass(NamedTuple):
  """What is found of every row, from the columns a few at a time.

  Attributes:
    sees: whether row and column see each other, by their places; also if a
      tile of rows and one of columns do, by its `row_bound` and
      `column_bound`.
    start: what is carried for a row, at first.
    add: from the logits, what is known of the columns, and what is carried.
    finish: from what is carried at last.
  """

  sees: Callable[[Array, Array], Array]
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
  now = jnp.maximum(largest, jnp.max(logits, axis=1))
  added = jnp.sum(jnp.exp(logits - _across(now)), axis=1)
  return now, total * jnp.exp(largest - now) + added


def _log_sum_exp(
  largest: Float[Array, " R"], total: Float[Array, " R"]
) -> Float[Array, " R"]:
  return jnp.where(largest > UNSEEN, largest + jnp.log(total), -jnp.inf)


def _add_weights(
  logits: Float[Array, "R C"], lse: Float[Array, " C"], mass: Float[Array, " R"]
) -> tuple[Float[Array, " R"]]:
  return (mass + jnp.sum(jnp.exp(logits - _down(lse)), axis=1),)


LSE = Pass(
  lambda query, key: key <= query,
  jnp.max,
  jnp.min,
  (UNSEEN, 0.0),
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
  row_places: Int[Array, "B K R"],
  column_places: Int[Array, "B K C"],
  scale: float,
  chunk: int,
  *known: Float[Array, "B N C"],
) -> Float[Array, "B N P R"]:
  """Each of P parts of the columns by itself; of H and J, one is N, one K."""
  batch, _, length, dim = rows.shape
  heads = max(rows.shape[1], columns.shape[1])
  tiles = length // ROWS
  begin, end = _ends(kind, row_places, column_places, chunk)
  parts = max(1, min(_BLOCKS // tiles, columns.shape[2] // COLUMNS))

  def kernel(
    rows: Any,
    columns: Any,
    row_places: Any,
    column_places: Any,
    begin: Any,
    end: Any,
    *rest: Any,
  ) -> None:
    *known, found, kept, result, barrier = rest
    b = jax.lax.axis_index("row")
    n = jax.lax.axis_index("head")
    i, part = jax.lax.axis_index("tile"), jax.lax.axis_index("part")

    def of(x: Any) -> Array:
      return jax.lax.div(n, jnp.int32(heads // x.shape[1]))

    here = pl.ds(i * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(rows.at[b, of(rows), here], kept, barrier)
    plgpu.barrier_wait(barrier)
    k = of(row_places)
    places = plgpu.load(
      row_places.at[b, k, here], layout=_BY_ROW, optimized=False
    )
    first, stop = begin[b, k, i], end[b, k, i]
    share = jax.lax.div(stop - first + (parts - 1), jnp.int32(parts))
    first = jnp.minimum(first + part * share, stop)
    stop = jnp.minimum(first + share, stop)

    def step(_: Any, columns: Any, *rest: Any) -> tuple[Array, ...]:
      *vectors, carry = rest

      def dot(sums: Any) -> Array:
        plgpu.wgmma(sums, kept, columns.transpose((1, 0)))
        return sums[...]

      sums = plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32)
      logits = pl.run_scoped(dot, sums) * scale
      theirs, *known = (
        plgpu.load(x, layout=_BY_COLUMN, optimized=False) for x in vectors
      )
      # What has been read may be overwritten from here on.
      plgpu.commit_smem()
      seen = kind.sees(_across(places), _down(theirs))
      return kind.add(jnp.where(seen, logits, UNSEEN), *known, *carry)

    def fetched(x: Any, *tail: int, **options: Any) -> plgpu.BlockSpec:
      """A few columns at a time of the head of an array."""
      return plgpu.BlockSpec(
        (None, None, COLUMNS, *tail),
        lambda j: (b, of(x), first + j, *(0 for _ in tail)),
        **options,
      )

    carry = plgpu.emit_pipeline(
      step,
      grid=(stop - first,),
      in_specs=[
        fetched(columns, dim, transforms=_TILED),
        *map(fetched, (column_places, *known)),
      ],
      max_concurrent_steps=2,
      init_carry=tuple(
        plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), _BY_ROW)
        for x in kind.start
      ),
    )(columns, column_places, *known)
    result[...] = kind.finish(*carry)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(result, found.at[b, n, part, here])
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
  )(rows, columns, row_places, column_places, begin, end, *known)


def _ends(
  kind: Pass,
  row_places: Int[Array, "B K R"],
  column_places: Int[Array, "B K C"],
  chunk: int,
) -> tuple[Int[Array, "B K I"], Int[Array, "B K I"]]:
  """The first tile of columns that each tile of rows needs, and the end."""
  rows = row_places.reshape(*row_places.shape[:2], -1, ROWS)
  columns = column_places.reshape(*column_places.shape[:2], -1, COLUMNS)
  needed = kind.sees(
    kind.row_bound(rows, axis=-1)[..., None],
    kind.column_bound(columns, axis=-1)[:, :, None],
  )
  index = jnp.arange(columns.shape[2], dtype=jnp.int32)
  if chunk:
    own = jnp.arange(rows.shape[2]) * ROWS // chunk
    theirs = index * COLUMNS // chunk
    needed &= (own[:, None] == theirs[None])[None, None]
  begin = jnp.min(jnp.where(needed, index, len(index)), axis=-1)
  end = jnp.max(jnp.where(needed, index + 1, 0), axis=-1)
  return jnp.minimum(begin, end), end


def _across(rows: Array) -> Array:
  return jax.lax.broadcast_in_dim(rows, (ROWS, COLUMNS), [0])


def _down(columns: Array) -> Array:
  return jax.lax.broadcast_in_dim(columns, (ROWS, COLUMNS), [1])
