"""Column sums of attention weights, by tiles of queries, in XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Logits of one query head that are alive at once.
_LOGITS = 2**19


def causal_mass(
  queries: Float[Array, "G S D"],
  keys: Float[Array, "T D"],
  query_positions: Int[Array, " S"],
  key_positions: Int[Array, " T"],
) -> Float[Array, "G T"]:
  """Sums over all queries of softmax(q.k / sqrt(D)), causal by positions.

  Args:
    queries: rotated queries of one KV head's group.
    keys: rotated keys; finite even where a slot is empty.
    query_positions: -1 for padding, which adds nothing.
    key_positions: -1 for empty slots, which receive nothing.

  Returns:
    The float32 mass of every key; the masses of a head sum to the number of
    its real queries that see a key.
  """
  length, dim = queries.shape[1:]
  size = min(length, max(1, _LOGITS // keys.shape[0]))
  keys = keys.astype(jnp.float32) * dim**-0.5
  extra = -length % size
  tiles = jnp.pad(queries, ((0, 0), (0, extra), (0, 0)))
  tiles = jnp.moveaxis(tiles.reshape(len(queries), -1, size, dim), 1, 0)
  places = jnp.pad(query_positions, (0, extra), constant_values=-1)

  def add(
    total: Float[Array, "G T"],
    tile: tuple[Float[Array, "G C D"], Int[Array, " C"]],
  ) -> tuple[Float[Array, "G T"], None]:
    queries, places = tile
    seen = (key_positions[None] >= 0) & (key_positions[None] <= places[:, None])
    # Padding may hold NaN, and the softmax of a row that sees nothing is NaN.
    queries = jnp.where(
      (places >= 0)[None, :, None], queries.astype(jnp.float32), 0.0
    )
    logits = jnp.einsum("gcd,td->gct", queries, keys)
    weights = jax.nn.softmax(logits, axis=-1, where=seen[None])
    weights = jnp.where(seen[None], weights, 0.0)
    return total + jnp.sum(weights, axis=1), None

  zero = jnp.zeros((len(queries), len(keys)), jnp.float32)
  total, _ = jax.lax.scan(add, zero, (tiles, places.reshape(-1, size)))
  return total


def chunk_mass(
  queries: Float[Array, "G T D"],
  keys: Float[Array, "T D"],
  held: Array,
  chunk: int,
  scale: float,
) -> Float[Array, "G T"]:
  """Column sums of softmax(scale q.k) inside chunks, without a causal mask.

  Source: Compactor, arXiv 2507.08143, Section 3: non-causal chunked attention.

  Args:
    queries: rotated queries of one KV head's group, one for every key.
    keys: rotated keys.
    held: bool [T], false for slots that neither ask nor receive.
    chunk: tokens per chunk; the last one may be shorter.
    scale: of the logits.

  Returns:
    The float32 mass of every key: its mean over a chunk's held keys is 1.
  """
  group, length, dim = queries.shape
  extra = -length % chunk
  held = jnp.pad(held, (0, extra)).reshape(-1, chunk)
  keys = jnp.pad(keys, ((0, extra), (0, 0))).reshape(-1, chunk, dim)
  queries = jnp.pad(queries, ((0, 0), (0, extra), (0, 0)))
  queries = jnp.moveaxis(queries.reshape(group, -1, chunk, dim), 1, 0)

  def one_chunk(
    part: tuple[Float[Array, "G C D"], Float[Array, "C D"], Array],
  ) -> Float[Array, "G C"]:
    queries, keys, held = part
    queries = jnp.where(held[None, :, None], queries.astype(jnp.float32), 0.0)
    keys = jnp.where(held[:, None], keys.astype(jnp.float32), 0.0)
    logits = jnp.einsum("gqd,kd->gqk", queries, keys) * scale
    seen = held[None, None]
    weights = jnp.where(seen, jax.nn.softmax(logits, axis=-1, where=seen), 0.0)
    return jnp.sum(jnp.where(held[None, :, None], weights, 0.0), axis=1)

  mass = jax.lax.map(one_chunk, (queries, keys, held))
  return jnp.moveaxis(mass, 0, 1).reshape(group, -1)[:, :length]
