"""Selection on TPUs: bisection in VMEM, then in-place stream compaction."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels import tuning
from kvjax.kernels.select.bisection import is_chosen, limits
from kvjax.kernels.select.keys import NEVER, ordered

# Facts of the hardware: sublanes and lanes of a register, and the scores of a
# block of rows that fit into VMEM.
_ROWS = 8
_LANES = 128
_MAX_SLOTS = 2**17


def largest_tpu(
  scores: Float[Array, "*B T"], counts: Int[Array, "*B"], size: int
) -> Int[Array, "*B M"]:
  """Computes `kvjax.kernels.select.largest`.

  Raises:
    NotImplementedError: there are more than 131,072 scores in a row, or
      nothing is to be selected.
  """
  slots = scores.shape[-1]
  if not scores.size or not size:
    raise NotImplementedError("There is nothing to select.")
  if slots > _MAX_SLOTS:
    raise NotImplementedError(
      f"{_ROWS} rows of more than {_MAX_SLOTS:,} scores do not fit into VMEM."
    )
  rows = math.prod(counts.shape)
  # Rows are sublanes; a block of fewer must be the whole axis.
  block = min(rows, _ROWS)
  width = pl.cdiv(slots, _LANES) * _LANES
  places = pl.cdiv(size, _LANES) * _LANES
  selected = pl.pallas_call(
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
      # Two buffers for inputs, two for outputs, and the scratch.
      vmem_limit_bytes=2**22 + 4 * _ROWS * (3 * width + 2 * places),
    ),
    name="largest",
  )(jnp.minimum(counts, size).reshape(rows, 1), scores.reshape(rows, slots))
  return selected.reshape(*counts.shape, size)


def mask_to_slots_tpu(
  mask: Bool[Array, "*B T"], size: int
) -> Int[Array, "*B M"]:
  """Computes `kvjax.kernels.select.mask_to_slots`."""
  # All true slots tie, and the lowest `size` of them win.
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
    counts_ref: how many slots to select of each row.
    scores_ref: the rows; undefined beyond `slots`.
    slots_ref: output, the selected slots.
    keys_ref: scratch of the scores' size.
    slots: T.
  """
  _each_tile(
    keys_ref, lambda tile: _write_keys(tile, scores_ref, keys_ref, slots)
  )
  # The padded width serves as T: padding has the key NEVER, which never counts.
  count = functools.partial(_count, keys_ref)
  least, end = limits(count, counts_ref[...], keys_ref.shape[1])
  _pack_tiles(keys_ref, least, end)
  _close_gaps(keys_ref)

  def write(tile: Array) -> None:
    gap = keys_ref[:, _tile_slice(tile)]
    # A slot is its new place plus the distance that it moved.
    slots_ref[:, _tile_slice(tile)] = jnp.where(
      gap < 0, -1, gap + _lanes(tile, gap)
    )

  _each_tile(slots_ref, write)


def _write_keys(
  tile: Array, scores_ref: jax.Ref, keys_ref: jax.Ref, slots: int
) -> None:
  keys = ordered(scores_ref[:, _tile_slice(tile)])
  keys_ref[:, _tile_slice(tile)] = jnp.where(
    _lanes(tile, keys) < slots, keys, NEVER
  )


def _pack_tiles(
  keys_ref: jax.Ref, least: Int[Array, "R 1"], end: Int[Array, "R 1"]
) -> None:
  """Moves selected slots left by their gap, modulo the width of a tile.

  The gap of a slot is the number of unselected slots before it, which is the
  distance it has to move. keys_ref then contains the gaps at the new places,
  and -1 elsewhere. Slots never collide, since every slot between two selected
  ones is itself selected or adds to the gap of the second. This holds after
  moving by any number of the low bits of the gaps, so each bit is one step.
  """
  rows, width = keys_ref.shape
  tiles = width // _LANES
  lane = jax.lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
  row_of = jax.lax.broadcasted_iota(jnp.int32, (_LANES, _LANES), 0)
  column = jax.lax.broadcasted_iota(jnp.int32, (_LANES, _LANES), 1)
  # A product with this triangle is an exclusive prefix sum along lanes.
  earlier = (row_of < column).astype(jnp.float32)
  bits = range(_LANES.bit_length() - 1)

  def pack(
    step: Array, carry: tuple[Int[Array, "R 1"], list[Int[Array, "R 128"]]]
  ) -> tuple[Int[Array, "R 1"], list[Int[Array, "R 128"]]]:
    # Last tile first: `following` has the rolls of the tile to the right, one
    # per bit of the gap, with the slots that leave it to the left.
    gaps_before, following = carry
    tile = tiles - 1 - step
    keys = keys_ref[:, _tile_slice(tile)]
    chosen = is_chosen(keys, _lanes(tile, keys), least, end)
    unchosen = jnp.where(chosen, 0.0, 1.0)
    # Sums of up to 128 ones are exact even in bfloat16 products.
    within = jnp.dot(unchosen, earlier, precision=jax.lax.Precision.DEFAULT)
    within = within.astype(jnp.int32)
    gaps_before -= jnp.sum(unchosen, axis=1, keepdims=True).astype(jnp.int32)
    gaps = jnp.where(chosen, gaps_before + within, -1)
    rolled = []
    for bit in bits:
      # A roll to the left wraps: what leaves the tile is in its last lanes,
      # where the tile before takes it from `following`.
      rolled_gaps = pltpu.roll(gaps, _LANES - (1 << bit), 1)
      arriving = jnp.where(
        lane < _LANES - (1 << bit), rolled_gaps, following[bit]
      )
      gaps = _move(gaps, arriving, bit)
      rolled.append(rolled_gaps)
    keys_ref[:, _tile_slice(tile)] = gaps
    return gaps_before, rolled

  no_gaps = jnp.full((rows, _LANES), -1, jnp.int32)
  chosen = _count(keys_ref, lambda keys, at: is_chosen(keys, at, least, end))
  jax.lax.fori_loop(0, tiles, pack, (width - chosen, [no_gaps for _ in bits]))


def _close_gaps(keys_ref: jax.Ref) -> None:
  """Moves slots by the remaining bits of their gaps, multiples of a tile."""
  tiles = keys_ref.shape[1] // _LANES
  lane_bits = _LANES.bit_length() - 1
  for tile_bit in range((tiles - 1).bit_length()):
    distance = 1 << tile_bit

    def close(
      tile: Array, distance: int = distance, bit: int = lane_bits + tile_bit
    ) -> None:
      # In place: tiles are visited from the left and read only from the right.
      gaps = keys_ref[:, _tile_slice(tile)]
      source = jnp.minimum(tile + distance, tiles - 1)
      arriving = jnp.where(
        tile + distance < tiles, keys_ref[:, _tile_slice(source)], -1
      )
      keys_ref[:, _tile_slice(tile)] = _move(gaps, arriving, bit)

    _each_tile(keys_ref, close)


def _move(
  gaps: Int[Array, "R 128"], arriving: Int[Array, "R 128"], bit: int
) -> Int[Array, "R 128"]:
  """Merges the slots that stay and those that arrive, by one bit of the gap."""
  mask = 1 << bit
  staying = jnp.where((gaps & mask) == 0, gaps, -1)
  # Slots never collide, so at most one of the two is not -1.
  return jnp.maximum(staying, jnp.where((arriving & mask) != 0, arriving, -1))


def _count(
  keys_ref: jax.Ref,
  predicate: Callable[
    [Int[Array, "R 128"], Int[Array, "R 128"]], Bool[Array, "R 128"]
  ],
) -> Int[Array, "R 1"]:
  """Counts, per row, the keys for which a predicate of key and slot holds."""

  def add(tile: Array, total: Int[Array, "R 128"]) -> Int[Array, "R 128"]:
    keys = keys_ref[:, _tile_slice(tile)]
    return total + jnp.where(predicate(keys, _lanes(tile, keys)), 1, 0)

  rows, width = keys_ref.shape
  total = jax.lax.fori_loop(
    0,
    width // _LANES,
    add,
    jnp.zeros((rows, _LANES), jnp.int32),
    unroll=_unroll(),
  )
  # Sums of up to 2**24 ones are exact in float32.
  total = jnp.sum(total.astype(jnp.float32), axis=1, keepdims=True)
  return total.astype(jnp.int32)


def _each_tile(ref: jax.Ref, visit: Callable[[Array], None]) -> None:
  def step(tile: Array, _: None) -> None:
    visit(tile)

  jax.lax.fori_loop(0, ref.shape[1] // _LANES, step, None, unroll=_unroll())


def _unroll() -> int:
  """Tiles per iteration of a loop."""
  return tuning.option("select/tpu", "unroll")


def _tile_slice(tile: Array) -> pl.Slice:
  return pl.ds(pl.multiple_of(tile * _LANES, _LANES), _LANES)


def _lanes(tile: Array, like: Int[Array, "R 128"]) -> Int[Array, "R 128"]:
  """Returns the slot numbers of a tile."""
  lane = jax.lax.broadcasted_iota(jnp.int32, like.shape, 1)
  return lane + tile * _LANES
