"""Causal attention mass on TPUs."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kvjax.kernels import tuning
from kvjax.kernels.attention.options import (
  PLAIN,
  AttentionOptions,
  decline_unless_plain,
)
from kvjax.kernels.attention_mass.tiles import MASKED, NEVER, pad_to_multiple
from kvjax.kernels.attention_mass.tpu_chunks import (
  chunk_mass_tpu as chunk_mass_tpu,
)
from kvjax.kernels.attention_mass.tpu_tiles import (
  check,
  column,
  joined_heads,
  kv_head,
  logits,
  params,
)

# Maximum number of masses in VMEM, a fact of the hardware.
_MASSES = 2**21


class _Plan(NamedTuple):
  """How the logits of a layer are divided into tiles.

  Attributes:
    kv_heads: K.
    group: G.
    joined: query heads of a group whose queries share a tile.
    size: queries of each head in a tile.
    tiles: number of tiles over the queries.
    width: slots per tile.
    key_tiles: number of tiles over the slots.
  """

  kv_heads: int
  group: int
  joined: int
  size: int
  tiles: int
  width: int
  key_tiles: int

  @property
  def rows(self) -> int:
    """Rows of a tile."""
    return self.joined * self.size

  @property
  def slots(self) -> int:
    """Slots of all tiles, with padding."""
    return self.key_tiles * self.width

  @classmethod
  def of(cls, heads: int, kv_heads: int, length: int, slots: int) -> "_Plan":
    """Plans tiles; short queries share one with other heads of their group."""
    # Rows of a tile (queries of one or more heads) and columns (slots).
    most_rows, most_slots = (
      tuning.option("attention_mass/tpu", name) for name in ("rows", "slots")
    )
    width = min(most_slots, pl.cdiv(slots, 128) * 128)
    key_tiles = pl.cdiv(slots, width)
    # 16 rows are a tile of bfloat16.
    size = min(most_rows, pl.cdiv(length, 16) * 16)
    # Each joined head has masses of its own, for all slots.
    limit = min(most_rows // size, _MASSES // (key_tiles * width))
    group = heads // kv_heads
    joined = joined_heads(group, limit) if length <= size else 1
    if joined * key_tiles * width > _MASSES:
      raise NotImplementedError(f"There is no kernel for {slots} slots.")
    tiles = pl.cdiv(length, size)
    return cls(kv_heads, group, joined, size, tiles, width, key_tiles)

  def kv_head_of(self, part: Array) -> Array:
    """Returns the KV head that a part of joined heads reads."""
    return kv_head(part, self.joined, self.group)

  def needed(
    self, b: Array, p: Array, i: Array, j: Array, last: Any, first: Any
  ) -> Array:
    """Returns whether a tile of queries attends to any slot of a tile.

    It compares the queries' last position with the slots' first one.
    """
    slots = (b * self.kv_heads + self.kv_head_of(p)) * self.key_tiles + j
    return last[b * self.tiles + i] >= first[slots]


def causal_mass_tpu(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"],
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  sinks: Float[Array, " N"] | None = None,
  options: AttentionOptions = PLAIN,
) -> Float[Array, "B N T"]:
  """Computes `kvjax.kernels.attention_mass.api.causal_mass`.

  A tile of queries visits all tiles of keys twice: first for its log-sum-exp,
  then to add its weights to the masses. The masses of all slots stay in VMEM
  until every tile of queries has added to them. Tiles above the diagonal are
  neither read nor computed.

  Raises:
    NotImplementedError: a dtype is neither bfloat16 nor float32, there are more
      than 2,097,152 slots or none, or attention is not plain.
  """
  decline_unless_plain(options, keys.shape[-1], sinks=sinks)
  check(queries, keys)
  batch, heads, length, dim = queries.shape
  kv_heads, slots = keys.shape[1:3]
  plan = _Plan.of(heads, kv_heads, length, slots)
  if plan.tiles == 1:
    # Joined heads are `size` rows apart. With several tiles, the last one may
    # be undefined beyond the queries, where the positions are -1.
    queries = pad_to_multiple(queries, 2, plan.size, 0)
  parts = heads // plan.joined
  queries = queries.reshape(batch, parts, -1, dim)
  row_positions = pad_to_multiple(query_positions, 1, plan.size, -1)
  last = jnp.max(row_positions.reshape(-1, plan.size), axis=1)
  # Beyond every query, so that `first` ignores empty slots.
  column_positions = jnp.where(key_positions >= 0, key_positions, NEVER)
  column_positions = pad_to_multiple(column_positions, 2, plan.width, NEVER)
  first = jnp.min(column_positions.reshape(-1, plan.width), axis=1)

  def key_tile(b: Any, p: Any, i: Any, phase: Any, j: Any, *ends: Any) -> Array:
    """Returns a tile of keys; 0 if none is needed, which avoids a new fetch."""
    del phase
    return jnp.where(plan.needed(b, p, i, j, *ends), j, 0)

  rows, width = plan.rows, plan.width
  masses = (batch, parts, plan.joined, plan.slots)
  # The innermost axes: tiles of queries, the two phases, tiles of keys.
  mass = pl.pallas_call(
    functools.partial(_tile, plan=plan, scale=dim**-0.5),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(batch, parts, plan.tiles, 2, plan.key_tiles),
      in_specs=[
        pl.BlockSpec((None, 1, rows), lambda b, p, i, *_: (b, 0, i)),
        pl.BlockSpec(
          (None, None, 1, width),
          lambda b, p, *at: (b, plan.kv_head_of(p), 0, key_tile(b, p, *at)),
        ),
        pl.BlockSpec((None, None, rows, dim), lambda b, p, i, *_: (b, p, i, 0)),
        pl.BlockSpec(
          (None, None, width, dim),
          lambda b, p, *at: (b, plan.kv_head_of(p), key_tile(b, p, *at), 0),
        ),
      ],
      out_specs=pl.BlockSpec(
        (None, None, *masses[2:]), lambda b, p, *_: (b, p, 0, 0)
      ),
      scratch_shapes=[pltpu.VMEM((rows, 1), jnp.float32)] * 2,
    ),
    out_shape=jax.ShapeDtypeStruct(masses, jnp.float32),
    # Tiles of queries add to the same masses, so their axis is not parallel.
    compiler_params=params(2, 3),
    name="causal_mass",
  )(
    last,
    first,
    # Heads are joined only if there is one tile of queries.
    jnp.tile(row_positions, (1, plan.joined))[:, None],
    column_positions[:, :, None],
    queries,
    keys,
  )
  return mass.reshape(batch, heads, -1)[..., :slots]


def _tile(
  last: Any,
  first: Any,
  row_positions: Any,
  column_positions: Any,
  queries: Any,
  keys: Any,
  mass: Any,
  largest: Any,
  total: Any,
  *,
  plan: _Plan,
  scale: float,
) -> None:
  """Processes a tile of logits in one of the two phases.

  Shapes: query positions [1, R], key positions [1, C], queries [R, D], keys
  [C, D], mass [H, T], largest and total [R, 1].
  """
  b, p, i, phase, j = map(pl.program_id, range(5))
  needed = plan.needed(b, p, i, j, last, first)
  # Scratch is reset and finished even if the tile itself is not needed.
  begins, ends = j == 0, j == plan.key_tiles - 1

  @pl.when((phase == 0) & (i == 0) & begins)
  def _() -> None:
    mass[...] = jnp.zeros_like(mass)

  @pl.when((phase == 0) & begins)
  def _() -> None:
    largest[...] = jnp.full_like(largest, MASKED)
    total[...] = jnp.zeros_like(total)

  def masked_logits() -> Array:
    tile = logits(queries[...], keys[...], scale)
    visible = column_positions[...] <= column(row_positions[...])
    return jnp.where(visible, tile, MASKED)

  @pl.when((phase == 0) & needed)
  def _() -> None:
    tile = masked_logits()
    previous = largest[...]
    # Until a key is visible, each masked one counts as exp(0) = 1; the first
    # visible one scales this count to 0.
    new_largest = jnp.maximum(previous, jnp.max(tile, axis=1, keepdims=True))
    new_terms = jnp.sum(jnp.exp(tile - new_largest), axis=1, keepdims=True)
    total[...] = total[...] * jnp.exp(previous - new_largest) + new_terms
    largest[...] = new_largest

  @pl.when((phase == 0) & ends)
  def _() -> None:
    # From here on `largest` is the log-sum-exp. A query without visible keys
    # adds nothing: exp(MASKED - 0) is 0.
    has_visible = largest[...] > MASKED
    lse = largest[...] + jnp.log(jnp.where(has_visible, total[...], 1.0))
    largest[...] = jnp.where(has_visible, lse, 0.0)

  @pl.when((phase == 1) & needed)
  def _() -> None:
    weights = jnp.exp(masked_logits() - largest[...])
    # Rows are ordered by joined head, then query.
    new_terms = jnp.sum(weights.reshape(plan.joined, -1, plan.width), axis=1)
    columns = pl.ds(pl.multiple_of(j * plan.width, plan.width), plan.width)
    mass[:, columns] = mass[:, columns] + new_terms
