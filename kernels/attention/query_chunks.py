"""Queries a few at a time, so that their logits stay few."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.partial import Partial

# From grouped queries and their positions to what they attend to.
Attend = Callable[[Float[Array, "B K G C D"], Int[Array, "B C"]], Partial]


def in_query_chunks(
  attend: Attend,
  queries: Float[Array, "B N S D"],
  query_positions: Int[Array, "B S"],
  kv_heads: int,
  size: int,
) -> Partial:
  """Groups queries by the KV head that they read and attends by chunks.

  Args:
    attend: attends a chunk of queries.
    queries: head j reads KV head j // (N / K).
    query_positions: place of each query in its row, -1 for padding.
    kv_heads: K.
    size: most queries per head in a chunk.
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
  extra = chunks * size - length
  grouped = jnp.pad(grouped, ((0, 0),) * 3 + ((0, extra), (0, 0)))
  places = jnp.pad(query_positions, ((0, 0), (0, extra)), constant_values=-1)

  def one_chunk(index: Int[Array, ""]) -> Partial:
    take = jax.lax.dynamic_slice_in_dim
    start = index * size
    return attend(take(grouped, start, size, 3), take(places, start, size, 1))

  def join(found: Float[Array, "C B K G c *D"]) -> Float[Array, "B N S *D"]:
    found = jnp.moveaxis(found, 0, 3)
    joined = found.reshape(batch, heads, chunks * size, *found.shape[5:])
    return joined[:, :, :length]

  output, lse = jax.lax.map(one_chunk, jnp.arange(chunks))
  return Partial(join(output), join(lse))
