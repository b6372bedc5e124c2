"""Prompt attention by splash attention, JAX's TPU kernel."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask_info as mask_info,
)
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels import tuning
from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.prompt_attention.padding import clear_padding

# What the tokens of a block are a multiple of.
LANES = 128
# Maximum number of pairs of blocks: their table is in scalar memory. Keys that
# are many are in longer blocks, whose keys and values take up to so many bytes.
PAIRS = 2**16
KEY_BYTES = 2**21
# Maximum number of queries per block whose tokens take more bytes than those of
# 16-bit heads of 128: the logits of longer blocks would not fit into VMEM too.
WIDE_BLOCK, NARROW_BYTES = 512, 512
# State of a pair of blocks: fully masked, partly masked, unmasked.
_NONE, _SOME, _ALL = range(3)


def prompt_attention_tpu(
  queries: Float[Array, "B N Q D"],
  keys: Float[Array, "B K S D"],
  values: Float[Array, "B K S Dv"],
  positions: Int[Array, "B S"],
  sinks: Float[Array, " N"] | None = None,
  start: Int[Array, ""] | None = None,
  options: AttentionOptions = PLAIN,
) -> Float[Array, "B N Q Dv"]:
  """Computes `kvjax.kernels.prompt_attention.xla.prompt_attention_xla`.

  Raises:
    NotImplementedError: the prompts have too many tokens (with 16-bit heads of
      128 in blocks of 512, more than 368,640 if all have a query), their dtype
      is neither bfloat16 nor float32, or queries of some of the tokens do not
      fill their blocks.
  """
  if queries.dtype not in (jnp.bfloat16, jnp.float32):
    raise NotImplementedError(f"No prompts of {queries.dtype} on TPUs.")
  batch, heads, length, dim = queries.shape
  tokens = keys.shape[2]
  slot = (dim + values.shape[-1]) * keys.dtype.itemsize
  block = tuning.option("prompt_attention/tpu", "block")
  if slot > NARROW_BYTES:
    block = min(block, WIDE_BLOCK)
  block = min(block, _round_up(length, LANES))
  if start is not None:
    block = math.gcd(length, block)
    if block % LANES:
      raise NotImplementedError(f"{length} queries do not fill their blocks.")
  rows, key_block = -(-length // block), block
  while rows * -(-tokens // key_block) > PAIRS:
    key_block *= 2
    if key_block * slot > KEY_BYTES:
      raise NotImplementedError(
        f"Splash attention takes {PAIRS} pairs of blocks; {length} queries and "
        f"{tokens} keys have more."
      )
  padded = _round_up(tokens, key_block)
  # In float32: a scale rounded to 16 bits would bias all logits.
  scaled = queries.astype(jnp.float32) * options.scale_of(dim)
  scaled = scaled.astype(queries.dtype)

  def rows_as_heads(
    x: Float[Array, "B H S D"], padded: int
  ) -> Float[Array, "R P D"]:
    """Folds rows into heads; head j still reads KV head j // (N / K)."""
    more = padded - x.shape[2]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))
    return x.reshape(-1, *x.shape[2:])

  # Positions are 0, 1, 2, ... in every row, so all share one static mask.
  queried = _round_up(tokens, block)
  mask = causal_blocks(queried, (block, key_block), options.window)
  if start is not None:
    mask = _rows_from(start, rows, block, mask)
  attend = splash.SplashAttentionKernel(
    mask,
    None,
    None,
    block_sizes=splash.BlockSizes(
      block_q=block, block_kv=key_block, block_kv_compute=block
    ),
    is_mqa=False,
    save_residuals=False,
    mask_value=splash.DEFAULT_MASK_VALUE,
    attn_logits_soft_cap=options.softcap,
    residual_checkpoint_name=None,
    mask_function=_visible_in(options.window),
    interpret=False,
  )
  # The matrix units would round float32 to bfloat16.
  precision = "highest" if queries.dtype == jnp.float32 else "default"
  with jax.default_matmul_precision(precision):
    output: Any = attend(
      rows_as_heads(scaled, rows * block),
      rows_as_heads(clear_padding(keys, positions), padded),
      rows_as_heads(clear_padding(values, positions), padded),
      # Rows were folded into heads, so every row needs its own copy.
      sinks=None if sinks is None else jnp.tile(sinks, batch),
    )
  output = output.reshape(batch, heads, -1, values.shape[-1])
  return output[:, :, :length]


def causal_blocks(
  tokens: int, sizes: tuple[int, int], window: int | None = None
) -> mask_info.MaskInfo:
  """Builds splash attention's block mask for a causal or sliding-window mask.

  Splash attention derives the same from its `CausalMask` or `LocalMask`, but
  visits every pair of tokens for it. That takes minutes for long prompts.

  Args:
    tokens: number of tokens, a multiple of the queries per block.
    sizes: queries per block, and keys per block.
    window: tokens that a query attends to, itself included; None for all.
  """
  if window is None:
    window = tokens
  size, key_size = sizes
  # Of each block of queries, as a column: its first and its last query, and the
  # first and the last block of keys that it sees.
  first = np.arange(0, tokens, size)[None, :, None]
  last = first + size - 1
  start = np.maximum(first - (window - 1), 0) // key_size
  end = last // key_size
  # As wide as the longest row; the leading axis of 1 is for all heads.
  column = start + np.arange(np.max(end - start) + 1)[None, None]
  first_key = column * key_size
  unmasked = first_key + key_size - 1 <= first
  # The last query and the first key of two blocks are the farthest apart.
  unmasked &= last - first_key < window
  seen = column <= end
  return mask_info.MaskInfo(
    # Fully masked pairs prefetch the first block of the next row.
    data_next=np.where(seen, column, 0).astype(np.int16),
    mask_next=None,
    block_mask=np.select([~seen, unmasked], [_NONE, _ALL], _SOME).astype(
      np.int8
    ),
    partial_mask_blocks=None,
    # Splash attention computes the mask of `_SOME` blocks from these positions.
    q_sequence=np.arange(tokens, dtype=np.int32),
  )


def _rows_from(
  start: Int[Array, ""], rows: int, size: int, mask: mask_info.MaskInfo
) -> mask_info.MaskInfo:
  """Returns the rows of a mask from the block of a query on.

  Args:
    start: the query.
    rows: number of rows.
    size: queries per row.
    mask: the mask of all tokens.
  """
  tables: Any = mask

  def take(table: Int[np.ndarray, "1 R C"]) -> Int[Array, "1 r C"]:
    first = start // size
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(table), first, rows, 1)

  own: mask_info.MaskInfo = tables._replace(
    data_next=take(tables.data_next),
    block_mask=take(tables.block_mask),
    q_sequence=start + jnp.arange(rows * size, dtype=jnp.int32),
  )
  return own


def _visible(
  query: Int[Array, "Q C"], key: Int[Array, "Q C"]
) -> Bool[Array, "Q C"]:
  return query >= key


@functools.cache
def _visible_in(window: int | None) -> Callable[[Array, Array], Array]:
  """Returns one function per window, since it is part of JAX's cache key."""
  if window is None:
    return _visible

  def visible(
    query: Int[Array, "Q C"], key: Int[Array, "Q C"]
  ) -> Bool[Array, "Q C"]:
    return (query >= key) & (query - key < window)

  return visible


def _round_up(number: int, of: int) -> int:
  return -(-number // of) * of
