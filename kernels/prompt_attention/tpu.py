"""Prompt attention by splash attention, JAX's TPU kernel."""

import functools
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

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.prompt_attention.padding import clear_padding

# Tokens per block: the maximum, and the number they are a multiple of.
BLOCK = 512
LANES = 128
# Maximum number of blocks; the table of their pairs is in scalar memory.
BLOCKS = 256
# State of a pair of blocks: fully masked, partly masked, unmasked.
_NONE, _SOME, _ALL = range(3)


def prompt_attention_tpu(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K S D"],
  values: Float[Array, "B K S Dv"],
  positions: Int[Array, "B S"],
  sinks: Float[Array, " N"] | None = None,
  options: AttentionOptions = PLAIN,
) -> Float[Array, "B N S Dv"]:
  """Computes `kvjax.kernels.prompt_attention.api.prompt_attention`.

  Raises:
    NotImplementedError: the prompts are longer than 131,072 tokens, or their
      dtype is neither bfloat16 nor float32.
  """
  if queries.dtype not in (jnp.bfloat16, jnp.float32):
    raise NotImplementedError(f"No prompts of {queries.dtype} on TPUs.")
  batch, heads, length, dim = queries.shape
  block = min(BLOCK, _round_up(length, LANES))
  blocks = -(-length // block)
  if blocks > BLOCKS:
    raise NotImplementedError(
      f"Splash attention takes prompts of up to {BLOCK * BLOCKS} tokens; these "
      f"have {length}."
    )
  padding = blocks * block - length
  # In float32: a scale rounded to 16 bits would bias all logits.
  scaled = queries.astype(jnp.float32) * options.scale_of(dim)
  scaled = scaled.astype(queries.dtype)

  def rows_as_heads(x: Float[Array, "B H S D"]) -> Float[Array, "R P D"]:
    """Folds rows into heads; head j still reads KV head j // (N / K)."""
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0)))
    return padded.reshape(-1, *padded.shape[2:])

  attend = splash.SplashAttentionKernel(
    # Positions are 0, 1, 2, ... in every row, so all share one static mask.
    causal_blocks(blocks, block, options.window),
    None,
    None,
    block_sizes=splash.BlockSizes(block_q=block, block_kv=block),
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
      rows_as_heads(scaled),
      rows_as_heads(clear_padding(keys, positions)),
      rows_as_heads(clear_padding(values, positions)),
      # Rows were folded into heads, so every row needs its own copy.
      sinks=None if sinks is None else jnp.tile(sinks, batch),
    )
  output = output.reshape(batch, heads, -1, values.shape[-1])
  return output[:, :, :length]


def causal_blocks(
  blocks: int, block: int, window: int | None = None
) -> mask_info.MaskInfo:
  """Builds splash attention's block mask for a causal or sliding-window mask.

  Splash attention derives the same from its `CausalMask` or `LocalMask`, but
  visits every pair of tokens for it. That takes minutes for long prompts.

  Args:
    blocks: number of blocks of queries, and of keys.
    block: tokens per block.
    window: tokens that a query attends to, itself included; None for all.
  """
  if window is None:
    window = blocks * block
  # Blocks before a query's block that its window may reach.
  reach = min(blocks - 1, -(-(window - 1) // block))
  # The grid is as wide as the longest row: row r visits only the reach + 1 key
  # blocks from max(r - reach, 0) on. A leading axis of 1 serves all heads.
  row, column = np.indices((1, blocks, reach + 1))[1:]
  column = column + np.maximum(row - reach, 0)
  # The last query and the first key of two blocks are the farthest apart.
  inside = (row - column + 1) * block <= window
  below = np.where(column < row, np.where(inside, _ALL, _SOME), _NONE)
  return mask_info.MaskInfo(
    # Fully masked pairs prefetch the first block of the next row.
    data_next=np.where(column <= row, column, 0).astype(np.int16),
    mask_next=None,
    block_mask=np.where(column == row, _SOME, below).astype(np.int8),
    partial_mask_blocks=None,
    # Splash attention computes the mask of `_SOME` blocks from these positions.
    q_sequence=np.arange(blocks * block, dtype=np.int32),
  )


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
