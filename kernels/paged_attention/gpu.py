"""Attention over pages on Hopper GPUs: all heads look at 64 slots at a time."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels.attention import Partial, warpgroup
from kvjax.kernels.attention.options import (
  PLAIN,
  AttentionOptions,
  decline_unless_plain,
)
from kvjax.kernels.attention.warpgroup import ROWS, Found, Tiles
from kvjax.kernels.paged_attention.owners import owners_of
from kvjax.kernels.quantized import Quantized, stored
from kvjax.kernels.stacks import index_stack


class _Operands(NamedTuple):
  """What the kernel reads: arrays or refs, T = R P slots in C chunks a row.

  Attributes:
    layer: of the stacks, [1].
    counts: chunks of each row up to the last of which anything is seen, [B].
    queries: of the token, 64 with padding, [B, 64, D].
    owners: head of each slot that the token sees, else -1, [B, C, 64].
    key_scales: of the keys if they are quantized, [B, C, 64].
    value_scales: of the values, likewise.
    keys: of all pages of all layers, [L, B, T, D].
    values: likewise.
  """

  layer: Any
  counts: Any
  queries: Any
  owners: Any
  key_scales: Any
  value_scales: Any
  keys: Any
  values: Any


def paged_attention_gpu(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "L B R P D"] | Quantized,
  values: Float[Array, "L B R P Dv"] | Quantized,
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B R P"],
  heads: Int[Array, "B R"],
  layer: Int[Array, ""],
  kv_heads: int,
  options: AttentionOptions = PLAIN,
) -> Partial:
  """See `kvjax.kernels.paged_attention.api.paged_attention`.

  Every page is read once, as far as any is seen in its row. Blocks of threads
  share a row, and XLA joins what they find.

  Raises:
    NotImplementedError: more than one token or than 64 query heads; no page;
      queries are not of 16 bits, keys and values neither of the same dtype nor
      int8; D is not 128, or 64 in 16 bits; attention is not plain.
  """
  decline_unless_plain(options, keys.shape[-1], values.shape[-1])
  batch, query_heads, length, dim = queries.shape
  dtypes = {stored(x).dtype for x in (keys, values)}
  if length != 1 or query_heads > ROWS or not heads.size:
    raise NotImplementedError(f"No {length} tokens, {query_heads} heads.")
  if queries.dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError("Queries are not of 16 bits.")
  if len(dtypes) > 1 or not dtypes < {queries.dtype, jnp.dtype("int8")}:
    raise NotImplementedError(f"No pages of {dtypes} are read.")
  (dtype,) = dtypes
  if dim not in (64, 128) or dim * dtype.itemsize % 128:
    raise NotImplementedError(f"No rows of {dim} {dtype} are read.")

  def cut(x: Shaped[Array, "B R P"], fill: float = 0) -> Shaped[Array, "B C c"]:
    x = x.reshape(batch, -1)
    wide = ((0, 0), (0, -x.shape[-1] % ROWS))
    return jnp.pad(x, wide, constant_values=fill).reshape(batch, -1, ROWS)

  def scales(
    x: Float[Array, "L B R P D"] | Quantized,
  ) -> Float[Array, "B C c"] | None:
    if not isinstance(x, Quantized):
      return None
    scale = index_stack(x.scale, layer)
    return cut(scale[..., 0].astype(jnp.float32))

  def rows(
    x: Float[Array, "L B R P D"] | Quantized,
  ) -> Shaped[Array, "L B T D"]:
    return stored(x).reshape(-1, batch, key_positions[0].size, dim)

  owners = cut(owners_of(query_positions, key_positions, heads), -1)
  chunks = owners.shape[1]
  numbers = jnp.arange(1, chunks + 1, dtype=jnp.int32)
  some = jnp.any(owners >= 0, axis=-1)
  wide = ((0, 0), (0, ROWS - query_heads), (0, 0))
  operands = _Operands(
    layer[None],
    jnp.max(jnp.where(some, numbers[None], 0), axis=-1),
    jnp.pad(queries[:, :, 0], wide),
    owners,
    scales(keys),
    scales(values),
    rows(keys),
    rows(values),
  )
  splits = max(1, min(chunks, warpgroup.WARPGROUPS // batch))
  each = -(-chunks // splits)
  splits = -(-chunks // each)
  leaves, tree = jax.tree.flatten(operands)
  found = plgpu.kernel(
    functools.partial(
      _kernel, tree=tree, each=each, group=query_heads // kv_heads
    ),
    out_type=Found.shapes((batch, splits), query_heads, dim),
    grid=(batch, splits),
    grid_names=("row", "split"),
    scratch_types=Tiles.types(dim, queries.dtype, dtype, True, 2, 1),
    compiler_params=warpgroup.PARAMS,
  )(*leaves)
  output, lse = Found(*found).joined(queries.dtype)
  return Partial(output[:, :, None], lse[..., None])


def _kernel(*refs: Any, tree: Any, each: int, group: int) -> None:
  """Attends to a part of a row; its chunks are fetched one ahead.

  Args:
    *refs: leaves of `_Operands`, `Found` and `Tiles`.
    tree: of the operands.
    each: chunks of a part.
    group: query heads that read a KV head.
  """
  count = tree.num_leaves
  read = jax.tree.unflatten(tree, refs[:count])
  to, tiles = Found(*refs[count : count + 3]), Tiles(*refs[count + 3 :])
  row, split = jax.lax.axis_index("row"), jax.lax.axis_index("split")
  first = split * each
  used = jnp.clip(read.counts[row] - first, 0, each)
  layer = read.layer[0]
  plgpu.copy_gmem_to_smem(read.queries.at[row], tiles.queries, tiles.ready)
  plgpu.barrier_wait(tiles.ready)

  (key_rows, value_rows), _ = tiles.rows

  def fetch(number: Array) -> None:
    buffer = number & 1
    slots = pl.ds((first + number) * ROWS, ROWS)
    for whole, rows in (
      (read.keys, key_rows),
      (read.values, value_rows),
    ):
      plgpu.copy_gmem_to_smem(
        whole.at[layer, row, slots], rows.at[buffer], tiles.arrived.at[buffer]
      )

  def attend(number: Array, found: Found) -> Found:
    pl.when(number + 1 < used)(lambda: fetch(number + 1))
    plgpu.barrier_wait(tiles.arrived.at[number & 1])
    at = (row, first + number)
    return _attend(found, tiles, number & 1, read, at, group)

  pl.when(used > 0)(lambda: fetch(jnp.int32(0)))
  found = Found.none(tiles.queries.shape[1])
  found = jax.lax.fori_loop(0, used, attend, found)
  warpgroup.write(found, tiles, Found(*(x.at[row, split] for x in to)))


def _attend(
  found: Found,
  tiles: Tiles,
  buffer: Array,
  read: _Operands,
  at: tuple[Array, Array],
  group: int,
) -> Found:
  def vector(ref: Any, layout: Any = warpgroup.OF_COLUMNS) -> Array:
    return plgpu.load(ref.at[at], layout=layout, optimized=False)

  def valid(layout: Any) -> Array:
    return vector(read.owners, layout) >= 0

  def adjust(logits: Array) -> Array:
    logits = logits * tiles.queries.shape[1] ** -0.5
    along = warpgroup.along_columns
    if read.key_scales is not None:
      logits = logits * along(vector(read.key_scales))
    query = plgpu.broadcasted_iota(
      jnp.int32, logits.shape, 0, layout=warpgroup.MATRIX
    )
    owner = along(vector(read.owners))
    own = (owner * group <= query) & (query < (owner + 1) * group)
    return jnp.where(own, logits, -jnp.inf)

  scales = read.value_scales
  return warpgroup.attend(
    found,
    tiles,
    buffer,
    valid,
    adjust,
    None if scales is None else vector(scales),
  )
