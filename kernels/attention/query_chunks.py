"""Splits queries into chunks to bound the number of logits in memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.partial import Partial

# Maps grouped queries and their positions to their attention output.
Attend = Callable[[Float[Array, "B K G C D"], Int[Array, "B C"]], Partial]


def in_query_chunks(
  attend: Attend,
  queries: Float[Array, "B N S D"],
  query_positions: Int[Array, "B S"],
  kv_heads: int,
  size: int,
) -> Partial:
  """Groups queries by their KV head and attends chunk by chunk.

  Args:
    attend: attends a chunk of queries.
    queries: head j reads KV head j // (N / K).
    query_positions: position of each query in its row, -1 for padding.
    kv_heads: K.
    size: the maximum number of queries per head in a chunk.
  """
  batch, heads, length, dim = queries.shape
  grouped = queries.reshape(batch, kv_heads, heads // kv_heads, length, dim)
  if length <= size:
    output, lse = attend(grouped, query_positions)
    return Partial(
      output.reshape(*queries.shape[:-1], output.shape[-1]),
      lse.reshape(queries.shape[:-1]),
    )

  chunks = -(-length // size)
  # 129 queries are two chunks of 65, not of 128.
  size = -(-length // chunks)
  extra = chunks * size - length
  grouped = jnp.pad(grouped, ((0, 0),) * 3 + ((0, extra), (0, 0)))
  # Padding queries precede all keys, so they attend to none.
  positions = jnp.pad(query_positions, ((0, 0), (0, extra)), constant_values=-1)

  def one_chunk(index: Int[Array, ""]) -> Partial:
    slice_of = jax.lax.dynamic_slice_in_dim
    start = index * size
    return attend(
      slice_of(grouped, start, size, 3), slice_of(positions, start, size, 1)
    )

  def join(chunked: Float[Array, "C B K G c *D"]) -> Float[Array, "B N S *D"]:
    # The chunk axis belongs right before the queries of a chunk.
    chunked = jnp.moveaxis(chunked, 0, 3)
    joined = chunked.reshape(batch, heads, chunks * size, *chunked.shape[5:])
    return joined[:, :, :length]

  output, lse = jax.lax.map(one_chunk, jnp.arange(chunks, dtype=jnp.int32))
  return Partial(join(output), join(lse))
