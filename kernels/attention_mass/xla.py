"""Column sums of attention weights, by tiles of queries, in XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention_mass.tiles import filled

# Logits of one query head that are alive at once, for a CPU's cache, but of no
# fewer queries than these: each tile reads all keys.
_LOGITS = 2**17
_QUERIES = 8


def causal_mass_xla(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"],
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  sinks: Float[Array, " N"] | None = None,
  options: AttentionOptions = PLAIN,
) -> Float[Array, "B N T"]:
  """See `kvjax.kernels.attention_mass.api.causal_mass`."""
  grouped = _grouped(queries, keys.shape[1])
  scale = options.scale_of(queries.shape[-1])
  places = query_positions[:, None]
  if sinks is not None:
    sinks = sinks.astype(jnp.float32).reshape(1, *grouped.shape[1:3], 1, 1)
  mass = _mass(grouped, keys, places, key_positions, scale, options, sinks)
  return mass.reshape(*queries.shape[:2], -1)


def chunk_mass_xla(
  queries: Float[Array, "B N T D"],
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  chunk: int,
  scale: float,
) -> Float[Array, "B N T"]:
  """See `kvjax.kernels.attention_mass.api.chunk_mass`."""
  batch, heads, length, _ = queries.shape
  # All that a chunk holds sees and is seen.
  places = jnp.where(valid, 0, -1)
  parts = (
    _tiles(_grouped(queries, keys.shape[1]), 3, chunk, 0),
    _tiles(keys, 2, chunk, 0),
    _tiles(places, 2, chunk, -1),
  )

  def one_chunk(
    part: tuple[
      Float[Array, "B K G C D"], Float[Array, "B K C D"], Int[Array, "B K C"]
    ],
  ) -> Float[Array, "B K G C"]:
    queries, keys, places = part
    return _mass(queries, keys, places, places, scale)

  mass = jnp.moveaxis(jax.lax.map(one_chunk, parts), 0, 3)
  return mass.reshape(batch, heads, -1)[..., :length]


def _mass(
  queries: Float[Array, "B K G S D"],
  keys: Float[Array, "B K T D"],
  query_places: Int[Array, "B #K S"],
  key_places: Int[Array, "B K T"],
  scale: float,
  options: AttentionOptions = PLAIN,
  sinks: Float[Array, "1 K G 1 1"] | None = None,
) -> Float[Array, "B K G T"]:
  """Column sums of the weights of keys of places from 0 to the query's.

  Args:
    queries: grouped by the KV head that they read.
    keys: what they meet.
    query_places: -1 for none.
    key_places: -1 for none.
    scale: of the logits, whatever the options say.
    options: what else there is to attention.
    sinks: logits that join the denominators.
  """
  size = min(queries.shape[3], max(_QUERIES, _LOGITS // keys.shape[2]))
  keys = keys.astype(jnp.float32)

  def add(
    total: Float[Array, "B K G T"],
    tile: tuple[Float[Array, "B K G C D"], Int[Array, "B #K C"]],
  ) -> tuple[Float[Array, "B K G T"], None]:
    queries, places = tile
    logits = jnp.einsum(
      "bkgcd,bktd->bkgct",
      queries.astype(jnp.float32) * scale,
      keys,
      precision=jax.lax.Precision.HIGHEST,
    )
    least = key_places[:, :, None]
    seen = (least >= 0) & options.seen(places[..., None], least)
    # What is not seen may be NaN; a query that sees nothing adds nothing.
    logits = jnp.where(seen[:, :, None], options.capped(logits), -jnp.inf)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    if sinks is not None:
      largest = jnp.maximum(largest, sinks)
    shift = jnp.where(largest > -jnp.inf, largest, 0.0)
    weights = jnp.exp(logits - shift)
    whole = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
      whole = whole + jnp.exp(sinks - shift)
    weights = weights / jnp.where(whole > 0, whole, 1.0)
    return total + jnp.sum(weights, axis=-2), None

  zero = jnp.zeros((*queries.shape[:3], keys.shape[2]), jnp.float32)
  if size == queries.shape[3]:
    return add(zero, (queries, query_places))[0]
  tiles = (_tiles(queries, 3, size, 0), _tiles(query_places, 2, size, -1))
  total, _ = jax.lax.scan(add, zero, tiles)
  return total


def _grouped(
  queries: Float[Array, "B N S D"], kv_heads: int
) -> Float[Array, "B K G S D"]:
  """Queries by the KV head that they read."""
  batch, _, length, dim = queries.shape
  return queries.reshape(batch, kv_heads, -1, length, dim)


def _tiles(x: Array, axis: int, size: int, empty: int) -> Array:
  """Cuts an axis into tiles, which come first; the last is filled up."""
  x = filled(x, axis, size, empty)
  shape = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
  return jnp.moveaxis(x.reshape(shape), axis, 0)
