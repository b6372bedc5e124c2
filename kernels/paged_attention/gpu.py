"""Attention over pages on Hopper GPUs: all heads read 64 slots at a time."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels import tuning
from kvjax.kernels.attention import warpgroup
from kvjax.kernels.attention.options import (
  PLAIN,
  AttentionOptions,
  decline_unless_plain,
)
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.attention.warpgroup import ROWS, PartialSums, Tiles
from kvjax.kernels.paged_attention.owners import owners_of
from kvjax.kernels.paged_attention.spans import Span, Window
from kvjax.kernels.quantized import Quantized, stored
from kvjax.kernels.stacks import index_stack


class _Operands(NamedTuple):
  """Inputs of the kernel, as arrays or refs; a row has T = R P slots.

  C chunks of a row are read.

  Attributes:
    layer: index of the layer in the stacks, [1].
    starts: first slot of each row that its chunks have, [B].
    counts: chunks of each row up to the last with a visible slot, [B].
    queries: queries of the token, padded to 64, [B, 64, D].
    owners: head of each slot that is visible to the token, else -1, [B, C, 64].
    key_scales: scales of quantized keys, [B, C, 64].
    value_scales: scales of quantized values, [B, C, 64].
    keys: keys of all pages of all layers, [L, B, T, D].
    values: values of all pages of all layers, [L, B, T, D].
  """

  layer: Any
  starts: Any
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
  span: Span | None = None,
) -> Partial:
  """Pallas kernel for `kvjax.kernels.paged_attention.paged_attention`.

  Every page is read once, up to the last visible one of its row. Several thread
  blocks share a row, and XLA merges their results.

  Raises:
    NotImplementedError: there is more than one token, more than 64 query heads
      or no page; queries do not have 16 bits, or keys and values have neither
      their dtype nor int8; D is not 128, or 64 in 16 bits; the slots of a row,
      or of a page of a span, are no multiple of 8; a row has several parts;
      attention is not plain but for its scale.
  """
  others = dataclasses.replace(options, scale=None)
  decline_unless_plain(others, keys.shape[-1], values.shape[-1])
  batch, query_heads, length, dim = queries.shape
  dtypes = {stored(x).dtype for x in (keys, values)}
  if length != 1 or query_heads > ROWS or not heads.size:
    raise NotImplementedError(f"No {length} tokens, {query_heads} heads.")
  if queries.dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError("Queries are not of 16 bits.")
  if len(dtypes) > 1 or not dtypes < {queries.dtype, jnp.dtype("int8")}:
    raise NotImplementedError(f"No pages of {dtypes} are read.")
  (dtype,) = dtypes
  # Swizzled shared memory consists of rows of 128 bytes.
  if dim not in (64, 128) or dim * dtype.itemsize % 128:
    raise NotImplementedError(f"No rows of {dim} {dtype} are read.")
  page, slots = key_positions.shape[2], key_positions[0].size
  if slots > 8 and slots % 8:  # Mosaic copies whole tiles of 8 rows.
    raise NotImplementedError(f"{slots} slots of a row are no multiple of 8.")
  starts = jnp.zeros(batch, jnp.int32)
  if window := Window.of(heads, span):
    if page % 8:
      raise NotImplementedError(f"Pages of {page} slots are no multiple of 8.")
    starts = window.first_slots(page)
    key_positions, heads = window.take((key_positions, heads))

  def to_chunks(
    x: Shaped[Array, "B R P"], fill: float = 0
  ) -> Shaped[Array, "B C c"]:
    x = x.reshape(batch, -1)
    padding = ((0, 0), (0, -x.shape[-1] % ROWS))
    return jnp.pad(x, padding, constant_values=fill).reshape(batch, -1, ROWS)

  def scales(
    x: Float[Array, "L B R P D"] | Quantized,
  ) -> Float[Array, "B C c"] | None:
    if not isinstance(x, Quantized):
      return None
    scale = index_stack(x.scale, layer)
    scale = window.take(scale) if window else scale
    return to_chunks(scale[..., 0].astype(jnp.float32))

  def rows(
    x: Float[Array, "L B R P D"] | Quantized,
  ) -> Shaped[Array, "L B T D"]:
    return stored(x).reshape(-1, batch, slots, dim)

  owners = to_chunks(owners_of(query_positions, key_positions, heads), -1)
  chunks = owners.shape[1]
  # From 1, so that the maximum is a number of chunks, 0 if none is visible.
  numbers = jnp.arange(1, chunks + 1, dtype=jnp.int32)
  any_visible = jnp.any(owners >= 0, axis=-1)
  padding = ((0, 0), (0, ROWS - query_heads), (0, 0))
  operands = _Operands(
    layer[None],
    starts,
    jnp.max(jnp.where(any_visible, numbers[None], 0), axis=-1),
    jnp.pad(queries[:, :, 0], padding),
    owners,
    scales(keys),
    scales(values),
    rows(keys),
    rows(values),
  )
  # One block per row would leave most multiprocessors idle.
  blocks = tuning.option("paged_attention/gpu", "blocks")
  splits = max(1, min(chunks, blocks // batch))
  chunks_per_split = -(-chunks // splits)
  # Rounding up may leave the last splits without chunks.
  splits = -(-chunks // chunks_per_split)
  leaves, tree = jax.tree.flatten(operands)
  partial = plgpu.kernel(
    functools.partial(
      _kernel,
      tree=tree,
      chunks_per_split=chunks_per_split,
      group=query_heads // kv_heads,
      scale=options.scale_of(dim),
    ),
    out_type=PartialSums.shapes((batch, splits), query_heads, dim),
    grid=(batch, splits),
    grid_names=("row", "split"),
    scratch_types=Tiles.types(dim, queries.dtype, dtype),
    compiler_params=warpgroup.PARAMS,
  )(*leaves)
  output, lse = PartialSums(*partial).joined(queries.dtype)
  return Partial(output[:, :, None], lse[..., None])


def _kernel(
  *refs: Any, tree: Any, chunks_per_split: int, group: int, scale: float
) -> None:
  """Attends to a part of a row, prefetching one chunk.

  Args:
    *refs: leaves of `_Operands`, `PartialSums` and `Tiles`.
    tree: tree structure of the operands.
    chunks_per_split: number of chunks of a part.
    group: query heads per KV head.
    scale: multiplies the logits.
  """
  count = tree.num_leaves
  read = jax.tree.unflatten(tree, refs[:count])
  output_refs, tiles = (
    PartialSums(*refs[count : count + 3]),
    Tiles(*refs[count + 3 :]),
  )
  row, split = jax.lax.axis_index("row"), jax.lax.axis_index("split")
  first = split * chunks_per_split
  used = jnp.clip(read.counts[row] - first, 0, chunks_per_split)
  layer, start = read.layer[0], read.starts[row]
  plgpu.copy_gmem_to_smem(read.queries.at[row], tiles.queries, tiles.ready)
  plgpu.barrier_wait(tiles.ready)

  (key_rows, value_rows), _ = tiles.rows

  def fetch(number: Array) -> None:
    buffer = number & 1
    # The last chunk may exceed T: its copy fills up with zeros, which have no
    # owner; nor have slots of other layers.
    slots = pl.ds(start + (first + number) * ROWS, ROWS)
    for source, rows in ((read.keys, key_rows), (read.values, value_rows)):
      plgpu.copy_gmem_to_smem(
        source.at[layer, row, slots], rows.at[buffer], tiles.arrived.at[buffer]
      )

  def attend(number: Array, partial: PartialSums) -> PartialSums:
    # The other buffer was read by the previous iteration, which synchronized
    # its threads after that.
    pl.when(number + 1 < used)(lambda: fetch(number + 1))
    plgpu.barrier_wait(tiles.arrived.at[number & 1])
    at = (row, first + number)
    return _attend(partial, tiles, number & 1, read, at, group, scale)

  pl.when(used > 0)(lambda: fetch(jnp.int32(0)))
  partial = PartialSums.none(tiles.queries.shape[1])
  partial = jax.lax.fori_loop(0, used, attend, partial)
  warpgroup.write(
    partial, tiles, PartialSums(*(x.at[row, split] for x in output_refs))
  )


def _attend(
  partial: PartialSums,
  tiles: Tiles,
  buffer: Array,
  read: _Operands,
  at: tuple[Array, Array],
  group: int,
  scale: float,
) -> PartialSums:
  def vector(ref: Any, layout: Any = warpgroup.OF_COLUMNS) -> Array:
    return plgpu.load(ref.at[at], layout=layout, optimized=False)

  def valid(layout: Any) -> Array:
    return vector(read.owners, layout) >= 0

  def adjust(logits: Array) -> Array:
    logits = logits * scale
    along = warpgroup.along_columns
    if read.key_scales is not None:
      logits = logits * along(vector(read.key_scales))
    query = plgpu.broadcasted_iota(
      jnp.int32, logits.shape, 0, layout=warpgroup.MATRIX
    )
    owner = along(vector(read.owners))
    # An owner of -1 matches no query. Padding queries match no owner.
    reads_head = (owner * group <= query) & (query < (owner + 1) * group)
    return jnp.where(reads_head, logits, -jnp.inf)

  scales = read.value_scales
  return warpgroup.attend(
    partial,
    tiles,
    buffer,
    valid,
    adjust,
    None if scales is None else vector(scales),
  )
