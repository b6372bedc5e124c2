"""Selection on TPUs: bisection in VMEM, then slots move down to their ranks."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.select.bisection import is_chosen, limits
from kvjax.kernels.select.keys import NEVER, ordered

_ROWS = 8
_LANES = 128
_MOST = 2**17
_UNROLL = 8


def largest_tpu(
  scores: Float[Array, "*B T"], counts: Int[Array, "*B"], size: int
) -> Int[Array, "*B M"]:
  """See `kvjax.kernels.select.largest`.

  Raises:
    NotImplementedError: there are more than 131,072 scores in a row.
  """
  slots = scores.shape[-1]
  if slots > _MOST:
    raise NotImplementedError(
      f"{_ROWS} rows of more than {_MOST:,} scores do not fit into VMEM."
    )
  rows = math.prod(counts.shape)
  block = min(rows, _ROWS)
  width = pl.cdiv(slots, _LANES) * _LANES
  places = pl.cdiv(size, _LANES) * _LANES
  found = pl.pallas_call(
    functools.partial(_kernel, slots=slots),
    grid=(pl.cdiv(rows, block),),
    in_specs=[
      pl.BlockSpec((block, 1), lambda i: (i, 0)),
      pl.BlockSpec((block, width), lambda i: (i, 0)),
    ],
    out_specs=pl.BlockSpec((block, places), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((rows, size), jnp.int32),
    scratch_shapes=[pltpu.VMEM((block, width), jnp.int32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",),
      # Two of what is read, two of what is written, and the scratch.
      vmem_limit_bytes=2**22 + 4 * _ROWS * (3 * width + 2 * places),
    ),
    name="largest",
  )(
    jnp.minimum(counts, size).reshape(rows, 1),
    scores.reshape(rows, slots),
  )
  return found.reshape(*counts.shape, size)


def true_slots_tpu(mask: Bool[Array, "*B T"], size: int) -> Int[Array, "*B M"]:
  """See `kvjax.kernels.select.true_slots`."""
  return largest_tpu(
    jnp.where(mask, 0.0, -jnp.inf), jnp.full(mask.shape[:-1], size), size
  )


def _kernel(
  counts_ref: jax.Ref,
  scores_ref: jax.Ref,
  slots_ref: jax.Ref,
  keys_ref: jax.Ref,
  *,
  slots: int,
) -> None:
  """Selects from a block of rows.

  Args:
    counts_ref: how many to take of each row.
    scores_ref: the rows; beyond `slots` it holds anything.
    slots_ref: what is selected.
    keys_ref: scratch as large as the scores.
    slots: T.
  """
  _each_tile(keys_ref, lambda tile: _key(tile, scores_ref, keys_ref, slots))
  count = functools.partial(_count, keys_ref)
  least, end = limits(count, counts_ref[...], keys_ref.shape[1])
  _pack_tiles(keys_ref, least, end)
  _close_gaps(keys_ref)

  def write(tile: Array) -> None:
    gap = keys_ref[:, _at(tile)]
    slots_ref[:, _at(tile)] = jnp.where(gap < 0, -1, gap + _lanes(tile, gap))

  _each_tile(slots_ref, write)


def _key(
  tile: Array, scores_ref: jax.Ref, keys_ref: jax.Ref, slots: int
) -> None:
  keys = ordered(scores_ref[:, _at(tile)])
  keys_ref[:, _at(tile)] = jnp.where(_lanes(tile, keys) < slots, keys, NEVER)


def _pack_tiles(
  keys_ref: jax.Ref, least: Int[Array, "R 1"], end: Int[Array, "R 1"]
) -> None:
  """Moves what is chosen by its gap, up to a multiple of a tile's width.

  A gap is how many slots before it are not chosen, which is how far a slot has
  to go; in its new place keys_ref holds it, and -1 where there is none. Two
  never meet: those between them are chosen or count as gap. The same holds when
  they have only moved by the lowest bits of their gaps.
  """
  rows, width = keys_ref.shape
  tiles = width // _LANES
  lane = jax.lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
  row_of = jax.lax.broadcasted_iota(jnp.int32, (_LANES, _LANES), 0)
  column = jax.lax.broadcasted_iota(jnp.int32, (_LANES, _LANES), 1)
  earlier = (row_of < column).astype(jnp.float32)
  bits = range(_LANES.bit_length() - 1)

  def pack(
    step: Array, carry: tuple[Int[Array, "R 1"], list[Int[Array, "R 128"]]]
  ) -> tuple[Int[Array, "R 1"], list[Int[Array, "R 128"]]]:
    gaps_before, following = carry
    tile = tiles - 1 - step
    keys = keys_ref[:, _at(tile)]
    chosen = is_chosen(keys, _lanes(tile, keys), least, end)
    left = jnp.where(chosen, 0.0, 1.0)
    # Sums of up to 128 ones are exact.
    within = jnp.dot(left, earlier, precision=jax.lax.Precision.DEFAULT)
    within = within.astype(jnp.int32)
    gaps_before -= jnp.sum(left, axis=1, keepdims=True).astype(jnp.int32)
    gaps = jnp.where(chosen, gaps_before + within, -1)
    rolled = []
    for bit in bits:
      here = pltpu.roll(gaps, _LANES - (1 << bit), 1)
      coming = jnp.where(lane < _LANES - (1 << bit), here, following[bit])
      gaps = _moved(gaps, coming, bit)
      rolled.append(here)
    keys_ref[:, _at(tile)] = gaps
    return gaps_before, rolled

  none = jnp.full((rows, _LANES), -1, jnp.int32)
  chosen = _count(keys_ref, lambda keys, at: is_chosen(keys, at, least, end))
  jax.lax.fori_loop(0, tiles, pack, (width - chosen, [none for _ in bits]))


def _close_gaps(keys_ref: jax.Ref) -> None:
  """Moves by whole tiles what `_pack_tiles` has moved within them."""
  tiles = keys_ref.shape[1] // _LANES
  lane_bits = _LANES.bit_length() - 1
  for tile_bit in range((tiles - 1).bit_length()):
    distance = 1 << tile_bit

    def close(
      tile: Array, distance: int = distance, bit: int = lane_bits + tile_bit
    ) -> None:
      gaps = keys_ref[:, _at(tile)]
      source = jnp.minimum(tile + distance, tiles - 1)
      coming = jnp.where(tile + distance < tiles, keys_ref[:, _at(source)], -1)
      keys_ref[:, _at(tile)] = _moved(gaps, coming, bit)

    _each_tile(keys_ref, close)


def _moved(
  gaps: Int[Array, "R 128"], coming: Int[Array, "R 128"], bit: int
) -> Int[Array, "R 128"]:
  """What stays and what comes, as a bit of its gap says."""
  mask = 1 << bit
  staying = jnp.where((gaps & mask) == 0, gaps, -1)
  return jnp.maximum(staying, jnp.where((coming & mask) != 0, coming, -1))


def _count(
  keys_ref: jax.Ref,
  counted: Callable[
    [Int[Array, "R 128"], Int[Array, "R 128"]], Bool[Array, "R 128"]
  ],
) -> Int[Array, "R 1"]:
  """Of each row how many keys, given with their slots, count."""

  def add(tile: Array, total: Int[Array, "R 128"]) -> Int[Array, "R 128"]:
    keys = keys_ref[:, _at(tile)]
    return total + jnp.where(counted(keys, _lanes(tile, keys)), 1, 0)

  rows, width = keys_ref.shape
  total = jax.lax.fori_loop(
    0,
    width // _LANES,
    add,
    jnp.zeros((rows, _LANES), jnp.int32),
    unroll=_UNROLL,
  )
  # Float32 adds up to 2**24 ones exactly.
  total = jnp.sum(total.astype(jnp.float32), axis=1, keepdims=True)
  return total.astype(jnp.int32)


def _each_tile(ref: jax.Ref, visit: Callable[[Array], None]) -> None:
  def step(tile: Array, _: None) -> None:
    visit(tile)

  jax.lax.fori_loop(0, ref.shape[1] // _LANES, step, None, unroll=_UNROLL)


def _at(tile: Array) -> pl.Slice:
  return pl.ds(pl.multiple_of(tile * _LANES, _LANES), _LANES)


def _lanes(tile: Array, like: Int[Array, "R 128"]) -> Int[Array, "R 128"]:
  """The number of each slot of a tile."""
  lane = jax.lax.broadcasted_iota(jnp.int32, like.shape, 1)
  return lane + tile * _LANES
