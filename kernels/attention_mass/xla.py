"""Attention mass by tiles of queries, in XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention_mass.tiles import pad_to_multiple

# Logits of one query head in memory at once, for a CPU's cache. A tile has at
# least this many queries, since each tile reads all keys.
_LOGITS = 2**17
_QUERIES = 8
# Of so few queries, as in the window of SnapKV, the products begin with keys,
# which XLA need not transpose. With more queries, this order is slower.
_FEW = 64


def causal_mass_xla(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"],
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  sinks: Float[Array, " N"] | None = None,
  options: AttentionOptions = PLAIN,
) -> Float[Array, "B N T"]:
  """Computes `kvjax.kernels.attention_mass.api.causal_mass`."""
  grouped = _group(queries, keys.shape[1])
  scale = options.scale_of(queries.shape[-1])
  positions = query_positions[:, None]
  if sinks is not None:
    sinks = sinks.astype(jnp.float32).reshape(1, *grouped.shape[1:3], 1, 1)
  mass = _mass(grouped, keys, positions, key_positions, scale, options, sinks)
  return mass.reshape(*queries.shape[:2], -1)


def chunk_mass_xla(
  queries: Float[Array, "B N T D"],
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  chunk: int,
  scale: float,
) -> Float[Array, "B N T"]:
  """Computes `kvjax.kernels.attention_mass.api.chunk_mass`."""
  batch, heads, length, _ = queries.shape
  # Equal positions make all valid slots of a chunk visible to each other.
  positions = jnp.where(valid, 0, -1)
  parts = (
    _split_tiles(_group(queries, keys.shape[1]), 3, chunk, 0),
    _split_tiles(keys, 2, chunk, 0),
    _split_tiles(positions, 2, chunk, -1),
  )

  def one_chunk(
    part: tuple[
      Float[Array, "B K G C D"], Float[Array, "B K C D"], Int[Array, "B K C"]
    ],
  ) -> Float[Array, "B K G C"]:
    queries, keys, positions = part
    return _mass(queries, keys, positions, positions, scale)

  mass = jnp.moveaxis(jax.lax.map(one_chunk, parts), 0, 3)
  return mass.reshape(batch, heads, -1)[..., :length]


def _mass(
  queries: Float[Array, "B K G S D"],
  keys: Float[Array, "B K T D"],
  query_positions: Int[Array, "B #K S"],
  key_positions: Int[Array, "B K T"],
  scale: float,
  options: AttentionOptions = PLAIN,
  sinks: Float[Array, "1 K G 1 1"] | None = None,
) -> Float[Array, "B K G T"]:
  """Sums the weights of keys at positions from 0 to the query's, by column.

  Args:
    queries: queries grouped by KV head.
    keys: keys.
    query_positions: -1 for none.
    key_positions: -1 for none.
    scale: multiplies the logits and overrides that of the options.
    options: window and softcap.
    sinks: logits that join the denominators.
  """
  size = min(queries.shape[3], max(_QUERIES, _LOGITS // keys.shape[2]))
  # Once: otherwise each tile of queries would convert all keys again.
  keys = keys.astype(jnp.float32)
  few = queries.shape[3] <= _FEW

  def add_few(
    total: Float[Array, "B K T G"],
    tile: tuple[Float[Array, "B K G C D"], Int[Array, "B #K C"]],
  ) -> tuple[Float[Array, "B K T G"], None]:
    queries, positions = tile
    logits = jnp.einsum(
      "bktd,bkgcd->bktgc",
      keys,
      queries.astype(jnp.float32) * scale,
      precision=jax.lax.Precision.HIGHEST,
    )
    rows = key_positions[..., None]
    visible = (rows >= 0) & options.visible(positions[:, :, None], rows)
    of_heads = None if sinks is None else jnp.swapaxes(sinks, 2, 3)
    weights = _softmax(logits, visible[:, :, :, None], options, of_heads, 2)
    return total + jnp.sum(weights, axis=-1), None

  def add(
    total: Float[Array, "B K G T"],
    tile: tuple[Float[Array, "B K G C D"], Int[Array, "B #K C"]],
  ) -> tuple[Float[Array, "B K G T"], None]:
    queries, positions = tile
    logits = jnp.einsum(
      "bkgcd,bktd->bkgct",
      queries.astype(jnp.float32) * scale,
      keys,
      precision=jax.lax.Precision.HIGHEST,
    )
    columns = key_positions[:, :, None]
    visible = (columns >= 0) & options.visible(positions[..., None], columns)
    weights = _softmax(logits, visible[:, :, None], options, sinks, -1)
    return total + jnp.sum(weights, axis=-2), None

  step = add_few if few else add
  lengths = queries.shape[2], keys.shape[2]
  lengths = lengths[::-1] if few else lengths
  total = jnp.zeros((*queries.shape[:2], *lengths), jnp.float32)
  if size == queries.shape[3]:
    total, _ = step(total, (queries, query_positions))
  else:
    tiles = (
      _split_tiles(queries, 3, size, 0),
      # Padding queries see nothing and add nothing.
      _split_tiles(query_positions, 2, size, -1),
    )
    total, _ = jax.lax.scan(step, total, tiles)
  return jnp.swapaxes(total, 2, 3) if few else total


def _softmax(
  logits: Float[Array, "*B"],
  visible: Bool[Array, "*#B"],
  options: AttentionOptions,
  sinks: Float[Array, "*#B"] | None,
  axis: int,
) -> Float[Array, "*B"]:
  """Computes the weights of logits along an axis of keys."""
  # Masked logits may be NaN; a query without visible keys adds nothing.
  logits = jnp.where(visible, options.cap(logits), -jnp.inf)
  largest = jnp.max(logits, axis=axis, keepdims=True)
  if sinks is not None:
    # Keeps exp(sinks - shift) from overflowing.
    largest = jnp.maximum(largest, sinks)
  shift = jnp.where(largest > -jnp.inf, largest, 0.0)
  weights = jnp.exp(logits - shift)
  denominator = jnp.sum(weights, axis=axis, keepdims=True)
  if sinks is not None:
    denominator = denominator + jnp.exp(sinks - shift)
  return weights / jnp.where(denominator > 0, denominator, 1.0)


def _group(
  queries: Float[Array, "B N S D"], kv_heads: int
) -> Float[Array, "B K G S D"]:
  """Groups queries by KV head."""
  batch, _, length, dim = queries.shape
  return queries.reshape(batch, kv_heads, -1, length, dim)


def _split_tiles(x: Array, axis: int, size: int, empty: int) -> Array:
  """Splits an axis into padded tiles, which become the first axis."""
  x = pad_to_multiple(x, axis, size, empty)
  shape = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
  return jnp.moveaxis(x.reshape(shape), axis, 0)
