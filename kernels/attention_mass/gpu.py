"""Attention mass on Hopper GPUs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.attention.options import (
  PLAIN,
  AttentionOptions,
  decline_unless_plain,
)
from kvjax.kernels.attention_mass.gpu_sweeps import LSE, MASS, ROWS, sweep
from kvjax.kernels.attention_mass.tiles import NEVER, pad_to_multiple


def causal_mass_gpu(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"],
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  sinks: Float[Array, " N"] | None = None,
  options: AttentionOptions = PLAIN,
) -> Float[Array, "B N T"]:
  """Computes `kvjax.kernels.attention_mass.api.causal_mass`.

  Raises:
    NotImplementedError: attention is not plain, there is a single query, or
      `_mass` declines.
  """
  decline_unless_plain(options, keys.shape[-1], sinks=sinks)
  if queries.shape[2] == 1:
    # The kernel pads it to a tile of 128: on an H200, it took six times as long
    # as XLA's program, and for 64 queries a quarter of its time.
    raise NotImplementedError("There is no kernel for a single query.")
  batch, kv_heads, _, dim = keys.shape
  query_positions = jnp.broadcast_to(
    query_positions[:, None], (batch, kv_heads, queries.shape[2])
  )
  return _mass(queries, keys, query_positions, key_positions, dim**-0.5, 0)


def chunk_mass_gpu(
  queries: Float[Array, "B N T D"],
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  chunk: int,
  scale: float,
) -> Float[Array, "B N T"]:
  """Computes `kvjax.kernels.attention_mass.api.chunk_mass`.

  Raises:
    NotImplementedError: the chunks are not a multiple of 128 slots, or `_mass`
      declines.
  """
  # A single chunk may have any length: padding is masked by its position.
  if valid.shape[2] <= chunk:
    chunk = 0
  if chunk % ROWS:
    raise NotImplementedError(f"There is no kernel for chunks of {chunk}.")
  # Equal positions make all valid slots of a chunk visible to each other.
  key_positions = jnp.where(valid, 0, -1)
  return _mass(queries, keys, key_positions, key_positions, scale, chunk)


def _mass(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"],
  query_positions: Int[Array, "B K S"],
  key_positions: Int[Array, "B K T"],
  scale: float,
  chunk: int,
) -> Float[Array, "B N T"]:
  """Sums the weights of keys at positions from 0 to the query's, by column.

  The first sweep computes the log-sum-exp of every query, the second the mass
  of every key.

  Args:
    queries: of a 16-bit dtype, whose products are exact in float32.
    keys: likewise.
    query_positions: -1 for none.
    key_positions: -1 for none.
    scale: multiplies the logits.
    chunk: slots that attend to each other, a multiple of `ROWS`; 0 for all.

  Raises:
    NotImplementedError: the dtype is another one, D is not 64, 128, 192 or 256,
      or an array is empty.
  """
  dtype, dim = queries.dtype, queries.shape[-1]
  # Tensor cores multiply float32 as TF32, with 10 bits of mantissa.
  if dtype != keys.dtype or dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError(f"There is no kernel for {dtype}, {keys.dtype}.")
  if dim % 64 or dim > 256 or not (queries.size and keys.size):
    raise NotImplementedError(f"There is no kernel for {queries.shape}.")
  slots = keys.shape[2]
  query_positions = pad_to_multiple(query_positions, 2, ROWS, -1)
  # At -1, empty slots would be visible to every query, even to padding.
  key_positions = jnp.where(key_positions >= 0, key_positions, NEVER)
  key_positions = pad_to_multiple(key_positions, 2, ROWS, NEVER)
  queries, keys = (pad_to_multiple(x, 2, ROWS, 0) for x in (queries, keys))
  # Rows are queries here and keys below, so that each block alone writes the
  # result of its rows, without atomic additions.
  partial = sweep(
    LSE, queries, keys, query_positions, key_positions, scale, chunk
  )
  # A query without visible keys adds nothing: exp(MASKED - 0) is 0.
  lse = jax.nn.logsumexp(partial, axis=2)
  lse = jnp.where(lse > -jnp.inf, lse, 0.0)
  partial = sweep(
    MASS, keys, queries, key_positions, query_positions, scale, chunk, lse
  )
  return jnp.sum(partial, axis=2)[..., :slots]
