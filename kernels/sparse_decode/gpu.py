"""Attention to listed slots on Hopper GPUs: every row is copied separately."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvjax.kernels import tuning
from kvjax.kernels.attention import warpgroup
from kvjax.kernels.attention.options import (
  PLAIN,
  AttentionOptions,
  decline_unless_plain,
)
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.attention.warpgroup import ROWS, PartialSums, Tiles
from kvjax.kernels.quantized import Quantized, stored
from kvjax.kernels.sparse_decode.lists import Lists

# Maximum number of biased queries per list: each takes a pass over its logits.
MAX_BIASED = 8
# Maximum number of chunks of a part of a list; its slots are in shared memory.
MAX_CHUNKS = 64


class _Operands(NamedTuple):
  """Inputs of the kernel, as arrays or refs.

  Attributes:
    layer: index of the layer in the stacks, [1].
    queries: queries of each list, padded to 64, [B, H, 64, D].
    lists: lists in chunks of 64.
    keys: all keys, [L, B, K, T, D].
    values: all values, [L, B, K, T, D].
  """

  layer: Any
  queries: Any
  lists: Lists
  keys: Any
  values: Any


def sparse_decode_gpu(
  queries: Float[Array, "B N D"],
  keys: Float[Array, "L B K T D"] | Quantized,
  values: Float[Array, "L B K T Dv"] | Quantized,
  slots: Int[Array, "B H M"],
  bias: Float[Array, "B N M"] | None,
  logits: Float[Array, "B N M"] | None,
  layer: Int[Array, ""],
  options: AttentionOptions = PLAIN,
  page: int = 1,
) -> Partial:
  """Pallas kernel for `kvjax.kernels.sparse_decode.sparse_decode`.

  It copies only the listed rows of keys and values, one at a time, those of a
  page too, and skips chunks of 64 entries after the last listed slot. Several
  thread blocks share a list if there are few lists, and XLA merges their
  results. XLA gathers the scales.

  Raises:
    NotImplementedError: queries do not have 16 bits, or keys and values have
      neither their dtype nor int8; D is not 128, or 64 in 16 bits; a list is
      empty, is for more than 64 query heads, or for more than 8 with a bias;
      attention is not plain.
  """
  del page, logits
  decline_unless_plain(options, keys.shape[-1], values.shape[-1])
  batch, heads, dim = queries.shape
  lists, most = slots.shape[1:]
  group = heads // lists
  dtypes = {stored(x).dtype for x in (keys, values)}
  if queries.dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError("Queries are not of 16 bits.")
  if len(dtypes) > 1 or not dtypes < {queries.dtype, jnp.dtype("int8")}:
    raise NotImplementedError(f"No rows of {dtypes} are read.")
  (dtype,) = dtypes
  if dim not in (64, 128) or dim * dtype.itemsize % 128 or not most:
    raise NotImplementedError(f"No {most} rows of {dim} {dtype} are read.")
  if group > (ROWS if bias is None else MAX_BIASED):
    raise NotImplementedError(f"{group} query heads read a list.")

  chunks = -(-most // ROWS)
  blocks = tuning.option("sparse_decode/gpu", "blocks")
  splits = max(1, min(chunks, blocks // (batch * lists)))
  chunks_per_split = min(-(-chunks // splits), MAX_CHUNKS)
  # MAX_CHUNKS may need more splits, rounding up fewer.
  splits = -(-chunks // chunks_per_split)
  grouped = queries.reshape(batch, lists, group, dim)
  # The matrix units multiply at least 64 rows.
  padded = jnp.pad(grouped, ((0, 0), (0, 0), (0, ROWS - group), (0, 0)))
  operands = _Operands(
    layer[None],
    padded,
    Lists.of(keys, values, layer, slots, bias, ROWS, chunks_per_split * splits),
    stored(keys),
    stored(values),
  )
  # One copy per row of keys and of values; two before, queries and slots.
  types = Tiles.types(dim, queries.dtype, dtype, False, 2 * ROWS, 2)
  leaves, tree = jax.tree.flatten(operands)
  partial = plgpu.kernel(
    functools.partial(_kernel, tree=tree, share=lists // keys.shape[2]),
    out_type=PartialSums.shapes((batch, lists, splits), group, dim),
    grid=(batch, lists, splits),
    grid_names=("row", "list", "split"),
    scratch_types=(*types, plgpu.SMEM((chunks_per_split, ROWS), jnp.int32)),
    compiler_params=warpgroup.PARAMS,
  )(*leaves)
  output, lse = PartialSums(*partial).joined(queries.dtype)
  return Partial(output.reshape(queries.shape), lse.reshape(batch, heads))


def _kernel(*refs: Any, tree: Any, share: int) -> None:
  """Attends to a part of a list, prefetching one chunk.

  Args:
    *refs: leaves of `_Operands`, `PartialSums` and `Tiles`, and the slots of
      the part.
    tree: tree structure of the operands.
    share: number of lists per KV head.
  """
  count = tree.num_leaves
  read = jax.tree.unflatten(tree, refs[:count])
  output_refs, tiles = (
    PartialSums(*refs[count : count + 3]),
    Tiles(*refs[count + 3 : -1]),
  )
  numbers = refs[-1]
  row, head, split = map(jax.lax.axis_index, ("row", "list", "split"))
  kv_head = jax.lax.div(head, share)
  layer = read.layer[0]
  chunks_per_split = numbers.shape[0]
  first = split * chunks_per_split
  entries = read.lists.counts[row, head]
  used = jax.lax.div(entries + ROWS - 1, ROWS) - first
  used = jnp.clip(used, 0, chunks_per_split)

  plgpu.copy_gmem_to_smem(
    read.queries.at[row, head], tiles.queries, tiles.ready
  )
  part = read.lists.numbers.at[row, head, pl.ds(first, chunks_per_split), 0]
  plgpu.copy_gmem_to_smem(part, numbers, tiles.ready)
  plgpu.barrier_wait(tiles.ready)

  (key_rows, value_rows), _ = tiles.rows

  def fetch(number: Array) -> None:
    buffer = number & 1

    def fetch_row(entry: Array, _: None) -> None:
      slot = numbers[number, entry]
      for source, rows in ((read.keys, key_rows), (read.values, value_rows)):
        plgpu.copy_gmem_to_smem(
          source.at[layer, row, kv_head, slot],
          rows.at[buffer, entry],
          tiles.arrived.at[buffer],
        )

    # The barrier counts all copies of a chunk, so empty entries fetch rows too.
    jax.lax.fori_loop(0, ROWS, fetch_row, None)

  def attend(number: Array, partial: PartialSums) -> PartialSums:
    # The other buffer was read by the previous iteration, which synchronized
    # its threads after that.
    pl.when(number + 1 < used)(lambda: fetch(number + 1))
    plgpu.barrier_wait(tiles.arrived.at[number & 1])
    at = (row, head, first + number)
    return _attend(partial, tiles, number & 1, read.lists, at)

  pl.when(used > 0)(lambda: fetch(jnp.int32(0)))
  partial = PartialSums.none(tiles.queries.shape[1])
  partial = jax.lax.fori_loop(0, used, attend, partial)
  at = (row, head, split)
  warpgroup.write(partial, tiles, PartialSums(*(x.at[at] for x in output_refs)))


def _attend(
  partial: PartialSums,
  tiles: Tiles,
  buffer: Array,
  lists: Lists,
  at: tuple[Any, ...],
) -> PartialSums:
  def vector(ref: Any, layout: Any = warpgroup.OF_COLUMNS) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)

  def valid(layout: Any) -> Array:
    return vector(lists.slots.at[(*at, 0)], layout) >= 0

  def adjust(logits: Array) -> Array:
    logits = logits * tiles.queries.shape[1] ** -0.5
    along = warpgroup.along_columns
    if lists.key_scales is not None:
      logits = logits * along(vector(lists.key_scales.at[(*at, 0)]))
    if lists.bias is not None:
      query = plgpu.broadcasted_iota(
        jnp.int32, logits.shape, 0, layout=warpgroup.MATRIX
      )
      # Vectors have the layout of columns: the bias of one query at a time.
      for number in range(lists.bias.shape[3]):
        query_bias = along(vector(lists.bias.at[(*at, number)]))
        logits = jnp.where(query == number, logits + query_bias, logits)
    return jnp.where(along(valid(warpgroup.OF_COLUMNS)), logits, -jnp.inf)

  scales = lists.value_scales
  return warpgroup.attend(
    partial,
    tiles,
    buffer,
    valid,
    adjust,
    None if scales is None else vector(scales.at[(*at, 0)]),
  )
