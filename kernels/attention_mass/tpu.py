"""Column sums of causal attention weights on TPUs."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.options import (
  PLAIN,
  AttentionOptions,
  decline_unless_plain,
)
from kvjax.kernels.attention_mass.tiles import NEVER, UNSEEN, filled
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

# Rows of a tile, a query of a head each, and its columns, which are slots.
_ROWS, _SLOTS = 1024, 1024
# Masses that stay in VMEM.
_MASSES = 2**21


class _Plan(NamedTuple):
  """How the logits of a layer are cut into tiles.

  Attributes:
    kv_heads: K.
    group: G.
    joined: query heads, all of a group or some, whose queries make a tile.
    size: queries of each of them in a tile.
    tiles: so many of all queries.
    width: slots of a tile.
    key_tiles: so many of all slots.
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
    """Of a tile."""
    return self.joined * self.size

  @property
  def slots(self) -> int:
    """Of all tiles."""
    return self.key_tiles * self.width

  @classmethod
  def of(cls, heads: int, kv_heads: int, length: int, slots: int) -> "_Plan":
    """Few queries are joined with those of other heads that read the same."""
    width = min(_SLOTS, pl.cdiv(slots, 128) * 128)
    key_tiles = pl.cdiv(slots, width)
    size = min(_ROWS, pl.cdiv(length, 16) * 16)
    most = min(_ROWS // size, _MASSES // (key_tiles * width))
    group = heads // kv_heads
    joined = joined_heads(group, most) if length <= size else 1
    if joined * key_tiles * width > _MASSES:
      raise NotImplementedError(f"There is no kernel for {slots} slots.")
    tiles = pl.cdiv(length, size)
    return cls(kv_heads, group, joined, size, tiles, width, key_tiles)

  def reads(self, part: Array) -> Array:
    """The KV head that some joined heads read."""
    return kv_head(part, self.joined, self.group)

  def needed(
    self, b: Array, p: Array, i: Array, j: Array, last: Any, first: Any
  ) -> Array:
    """Whether a tile of queries sees any of a tile of slots.

    By the last position of the queries and the first of the slots.
    """
    slots = (b * self.kv_heads + self.reads(p)) * self.key_tiles + j
    return last[b * self.tiles + i] >= first[slots]


def causal_mass_tpu(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"],
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  sinks: Float[Array, " N"] | None = None,
  options: AttentionOptions = PLAIN,
) -> Float[Array, "B N T"]:
  """See `kvjax.kernels.attention_mass.api.causal_mass`.

  A tile of queries meets all tiles of keys twice: first its log-sum-exp is
  found, then what it gives to the keys. The masses of all slots stay in VMEM
  until every tile of queries has added to them. Tiles that lie wholly above
  the diagonal are neither read nor computed.

  Raises:
    NotImplementedError: of dtypes other than bfloat16 and float32, of more
      than 2,097,152 slots, or of nothing; attention is not plain.
  """
  decline_unless_plain(options, keys.shape[-1], sinks=sinks)
  check(queries, keys)
  batch, heads, length, dim = queries.shape
  kv_heads, slots = keys.shape[1:3]
  plan = _Plan.of(heads, kv_heads, length, slots)
  if plan.tiles == 1:
    queries = filled(queries, 2, plan.size, 0)
  parts = heads // plan.joined
  queries = queries.reshape(batch, parts, -1, dim)
  asked = filled(query_positions, 1, plan.size, -1)
  last = jnp.max(asked.reshape(-1, plan.size), axis=1)
  places = jnp.where(key_positions >= 0, key_positions, NEVER)
  places = filled(places, 2, plan.width, NEVER)
  first = jnp.min(places.reshape(-1, plan.width), axis=1)

  def fetched(b: Any, p: Any, i: Any, phase: Any, j: Any, *ends: Any) -> Array:
    """A tile of keys; the same one again where none is needed."""
    del phase
    return jnp.where(plan.needed(b, p, i, j, *ends), j, 0)

  rows, width = plan.rows, plan.width
  masses = (batch, parts, plan.joined, plan.slots)
  mass = pl.pallas_call(
    functools.partial(_tile, plan=plan, scale=dim**-0.5),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(batch, parts, plan.tiles, 2, plan.key_tiles),
      in_specs=[
        pl.BlockSpec((None, 1, rows), lambda b, p, i, *_: (b, 0, i)),
        pl.BlockSpec(
          (None, None, 1, width),
          lambda b, p, *at: (b, plan.reads(p), 0, fetched(b, p, *at)),
        ),
        pl.BlockSpec((None, None, rows, dim), lambda b, p, i, *_: (b, p, i, 0)),
        pl.BlockSpec(
          (None, None, width, dim),
          lambda b, p, *at: (b, plan.reads(p), fetched(b, p, *at), 0),
        ),
      ],
      out_specs=pl.BlockSpec(
        (None, None, *masses[2:]), lambda b, p, *_: (b, p, 0, 0)
      ),
      scratch_shapes=[pltpu.VMEM((rows, 1), jnp.float32)] * 2,
    ),
    out_shape=jax.ShapeDtypeStruct(masses, jnp.float32),
    compiler_params=params(2, 3),
    name="causal_mass",
  )(
    last,
    first,
    jnp.tile(asked, (1, plan.joined))[:, None],
    places[:, :, None],
    queries,
    keys,
  )
  return mass.reshape(batch, heads, -1)[..., :slots]


def _tile(
  last: Any,
  first: Any,
  asked: Any,
  places: Any,
  queries: Any,
  keys: Any,
  mass: Any,
  largest: Any,
  total: Any,
  *,
  plan: _Plan,
  scale: float,
) -> None:
  """One tile: 1 R, 1 C, R D, C D and R 1 to all masses, H T."""
  b, p, i, phase, j = map(pl.program_id, range(5))
  needed = plan.needed(b, p, i, j, last, first)
  begins, ends = j == 0, j == plan.key_tiles - 1

  @pl.when((phase == 0) & (i == 0) & begins)
  def _() -> None:
    mass[...] = jnp.zeros_like(mass)

  @pl.when((phase == 0) & begins)
  def _() -> None:
    largest[...] = jnp.full_like(largest, UNSEEN)
    total[...] = jnp.zeros_like(total)

  def seen() -> Array:
    found = logits(queries[...], keys[...], scale)
    return jnp.where(places[...] <= column(asked[...]), found, UNSEEN)

  @pl.when((phase == 0) & needed)
  def _() -> None:
    found = seen()
    before = largest[...]
    now = jnp.maximum(before, jnp.max(found, axis=1, keepdims=True))
    added = jnp.sum(jnp.exp(found - now), axis=1, keepdims=True)
    total[...] = total[...] * jnp.exp(before - now) + added
    largest[...] = now

  @pl.when((phase == 0) & ends)
  def _() -> None:
    # From here on it is the log-sum-exp. A query that sees nothing gives
    # nothing: exp(UNSEEN - 0) is 0.
    sees = largest[...] > UNSEEN
    found = largest[...] + jnp.log(jnp.where(sees, total[...], 1.0))
    largest[...] = jnp.where(sees, found, 0.0)

  @pl.when((phase == 1) & needed)
  def _() -> None:
    weights = jnp.exp(seen() - largest[...])
    added = jnp.sum(weights.reshape(plan.joined, -1, plan.width), axis=1)
    here = pl.ds(pl.multiple_of(j * plan.width, plan.width), plan.width)
    mass[:, here] = mass[:, here] + added
