"""Attention over pages on TPUs: every head reads all slots of a block."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from kvjax.kernels import tuning
from kvjax.kernels.attention.options import (
  PLAIN,
  AttentionOptions,
  decline_unless_plain,
)
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.attention.running import Running
from kvjax.kernels.paged_attention.owners import owners_of
from kvjax.kernels.paged_attention.spans import Span, Window
from kvjax.kernels.quantized import Quantized, stored
from kvjax.kernels.stacks import index_stack

# Facts of the hardware: lanes of a register, and slots in a tile of the widest
# packing, int8.
LANES = 128
ROWS = 32
DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "int8")))


class _Operands(NamedTuple):
  """Inputs of the kernel, as arrays or refs; a row has T = R P slots.

  M slots of a row, which are whole blocks, are read.

  Attributes:
    queries: queries of the token, [B, N, D].
    owners: head of each slot that is visible to the token, else -1, [B, 1, M].
    key_scales: scales of quantized keys, [B, 1, M].
    value_scales: scales of quantized values, [B, 1, M].
    keys: keys of all pages of all layers, [L, B, T, D].
    values: values of all pages of all layers, [L, B, T, D].
  """

  queries: Any
  owners: Any
  key_scales: Any
  value_scales: Any
  keys: Any
  values: Any


def paged_attention_tpu(
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

  Every page is read once, up to the last visible one of its row. With T = R P
  slots these are 2 T D entries, which is optimal if D is a multiple of 128, and
  8 or 12 bytes per slot for its owner and scales. Of a span, it reads the
  blocks that have some of its pages. Queries are multiplied with the keys of
  all heads, because the matrix units are not the bottleneck.

  Raises:
    NotImplementedError: there is more than one token or no page; P is not a
      multiple of 32; the dtype is not float32, bfloat16 or int8; attention is
      not plain; a row has several parts.
  """
  decline_unless_plain(options, keys.shape[-1], values.shape[-1])
  if queries.shape[2] != 1 or not heads.size:
    raise NotImplementedError("One token reads one page at least.")
  if key_positions.shape[-1] % ROWS:
    raise NotImplementedError("Pages are not whole tiles.")
  dtypes = {stored(x).dtype for x in (keys, values)}
  if len(dtypes) > 1 or not dtypes.issubset(DTYPES):
    raise NotImplementedError(f"No pages of {dtypes} are read.")

  window = Window.of(heads, span)
  if window:
    key_positions, heads = window.take((key_positions, heads))
  owners = owners_of(query_positions, key_positions, heads)
  block = min(_block(), -(-owners[0].size // LANES) * LANES)
  operands = _operands(queries, keys, values, owners, layer, window, block)
  first = jnp.zeros(len(owners), jnp.int32)
  if window:
    first = window.first_slots(key_positions.shape[2]) // block
  group = queries.shape[1] // kv_heads
  largest, total, weighted = _call(operands, layer, first, group, block)
  return Partial.of(largest, total, weighted[:, :, None], queries.dtype)


def _block() -> int:
  """Slots per block, at most."""
  return tuning.option("paged_attention/tpu", "block")


def _operands(
  queries: Float[Array, "B N 1 D"],
  keys: Float[Array, "L B R P D"] | Quantized,
  values: Float[Array, "L B R P D"] | Quantized,
  owners: Int[Array, "B M P"],
  layer: Int[Array, ""],
  window: Window | None,
  block: int,
) -> _Operands:
  batch, _, page = owners.shape

  def flat(x: Shaped[Array, "B M P"], fill: float) -> Shaped[Array, "B 1 T"]:
    """Pads slots to the blocks that they are in.

    Only owners and scales are padded. Keys and values beyond T are undefined,
    and those before and after a window are other layers'; their owner is -1.
    """
    x = x.reshape(batch, 1, -1)
    # A page may begin anywhere in the window's first block.
    before = block - math.gcd(block, page) if window else 0
    size = -(-(before + x.shape[-1]) // block) * block
    padding = ((0, 0), (0, 0), (before, size - x.shape[-1]))
    x = jnp.pad(x, padding, constant_values=fill)
    if window is None:
      return x
    start = before - window.first_slots(page) % block
    cut = functools.partial(
      jax.lax.dynamic_slice_in_dim, slice_size=size, axis=1
    )
    return jax.vmap(cut)(x, start)

  def scales(
    x: Float[Array, "L B R P D"] | Quantized,
  ) -> Float[Array, "B 1 _"] | None:
    if not isinstance(x, Quantized):
      return None
    scale = index_stack(x.scale, layer)
    scale = window.take(scale) if window else scale
    return flat(scale[..., 0].astype(jnp.float32), 0.0)

  def rows(
    x: Float[Array, "L B R P D"] | Quantized,
  ) -> Shaped[Array, "L B T D"]:
    x = stored(x)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])

  return _Operands(
    queries[:, :, 0],
    flat(owners, -1),
    scales(keys),
    scales(values),
    rows(keys),
    rows(values),
  )


def _call(
  operands: _Operands,
  layer: Int[Array, ""],
  first: Int[Array, " B"],
  group: int,
  block: int,
) -> tuple[Float[Array, "B N _"], ...]:
  batch, query_heads, dim = operands.queries.shape
  blocks = operands.owners.shape[-1] // block
  visible = operands.owners.reshape(batch, blocks, block) >= 0
  counts = jnp.sum(visible, axis=-1, dtype=jnp.int32)
  numbers = jnp.arange(blocks, dtype=jnp.int32)
  # Index of a block, 0 if none is visible; then `counts` skips block 0.
  last = jnp.max(jnp.where(counts > 0, numbers[None], 0), axis=-1)

  # Outputs keep their block over all slots of a row: the state of the softmax
  # stays in VMEM.
  def of_row(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec((1, *x.shape[1:]), lambda b, i, *_: (b, 0, 0))

  # Nothing is fetched after the last visible block.
  # Pallas fetches a block only if its index differs from that of the last step.
  row = pl.BlockSpec(
    (1, 1, block), lambda b, i, last, *_: (b, 0, jnp.minimum(i, last[b]))
  )
  rows = pl.BlockSpec(
    (None, 1, block, dim),
    lambda b, i, last, _, layer, first: (
      layer[0],
      b,
      first[b] + jnp.minimum(i, last[b]),
      0,
    ),
  )
  specs = _Operands(
    of_row(operands.queries),
    row,
    None if operands.key_scales is None else row,
    None if operands.value_scales is None else row,
    rows,
    rows,
  )
  shapes = tuple(
    jax.ShapeDtypeStruct((batch, query_heads, width), jnp.float32)
    for width in (1, 1, dim)
  )
  call = pl.pallas_call(
    functools.partial(_kernel, group=group),
    out_shape=shapes,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(batch, blocks),
      in_specs=(specs,),
      out_specs=tuple(map(of_row, shapes)),
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    name="paged_attention",
  )
  return tuple(call(last, counts.reshape(-1), layer[None], first, operands))


def _kernel(
  last: Any,
  counts: Any,
  layer: Any,
  first: Any,
  read: _Operands,
  largest: Any,
  total: Any,
  weighted: Any,
  *,
  group: int,
) -> None:
  """Attends to a block of slots."""
  del last, layer, first
  number = pl.program_id(1)
  count = counts[pl.program_id(0) * pl.num_programs(1) + number]
  block = read.owners.shape[-1]
  running_refs = (largest, total, weighted)

  @pl.when(number == 0)
  def _() -> None:
    _write(running_refs, Running.none(*weighted.shape[1:]))

  # Masking is slow, and only few blocks have slots that are not visible.
  @pl.when(count == block)
  def _() -> None:
    _write(
      running_refs, _attend(read, Running(*_values(running_refs)), group, False)
    )

  @pl.when((count > 0) & (count < block))
  def _() -> None:
    _write(
      running_refs, _attend(read, Running(*_values(running_refs)), group, True)
    )


def _values(refs: Sequence[Any]) -> Iterator[Array]:
  return (ref[0] for ref in refs)


def _write(refs: Sequence[Any], values: Running) -> None:
  for ref, value in zip(refs, values, strict=True):
    ref[0] = value


def _attend(
  read: _Operands, running: Running, group: int, ragged: bool
) -> Running:
  queries, owners = read.queries[0], read.owners[0]
  keys, values = read.keys[0], read.values[0]
  # Quantized rows are multiplied in the precision of the queries.
  dtype = queries.dtype if keys.dtype == jnp.int8 else keys.dtype
  # Invisible values may be NaN, and 0 * NaN is NaN; int8 entries never are.
  if ragged and values.dtype != jnp.int8:
    visible = jnp.transpose(owners) >= 0
    values = jnp.where(visible, values, jnp.zeros((), values.dtype))
  head = jax.lax.broadcasted_iota(jnp.int32, (queries.shape[0], 1), 0)
  # Bounds need no division. An owner of -1 gives none: its heads end below 0.
  first = owners * group
  return running.after(
    queries,
    keys.astype(dtype),
    values.astype(dtype),
    (first <= head) & (head < first + group),
    None,
    *(
      None if x is None else x[0] for x in (read.key_scales, read.value_scales)
    ),
  )
