"""Selection by counts and prefix sums; short rows are sorted."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from kvjax.kernels.select.bisection import Count, Rows, is_chosen, limits
from kvjax.kernels.select.keys import NEVER, ordered

# Rows up to this length are sorted: it compiles faster and is hardly slower.
_SHORT = 2048
# So few slots are found one after another, as CTkvr's few nearest centroids.
_FEW = 8

# Lanes of a partial count, whose numbers need few bits.
_LANES = 128
_WORD = 32


def largest_xla(
  scores: Float[Array, "*B T"], counts: Int[Array, "*B"], size: int
) -> Int[Array, "*B M"]:
  """Computes `kvjax.kernels.select.largest`."""
  counts = jnp.minimum(counts, size)
  if 0 < size <= _FEW:
    return _few_largest(scores, counts[..., None], size)
  if scores.shape[-1] <= _SHORT:
    best = _best_first(scores, counts[..., None])
    return _ascending(best, size, scores.shape[-1])
  return mask_to_slots_xla(among_largest_xla(scores, counts), size)


def among_largest_xla(
  scores: Float[Array, "*B T"], counts: Int[Array, "*B"]
) -> Bool[Array, "*B T"]:
  """Computes `kvjax.kernels.select.among_largest`."""
  slots, wanted = scores.shape[-1], counts[..., None]
  if slots <= _SHORT:
    return slots_to_mask_xla(_best_first(scores, wanted), slots)
  least, end = limits(_counter(scores), wanted, slots)
  return within_limits(scores, least, end)


def within_limits(
  scores: Float[Array, "*B T"],
  least: Int[Array, "*B 1"],
  end: Int[Array, "*B 1"],
) -> Bool[Array, "*B T"]:
  """Computes the mask of the slots within `bisection.limits`."""
  return is_chosen(ordered(scores), _slots(scores.shape), least, end)


def mask_to_slots_xla(
  mask: Bool[Array, "*B T"], size: int
) -> Int[Array, "*B M"]:
  """Computes `kvjax.kernels.select.mask_to_slots`."""
  if mask.shape[-1] <= _SHORT:
    slots, end = _slots(mask.shape), mask.shape[-1]
    return _ascending(jnp.where(mask, slots, end), size, end)
  # The lanes are a multiple of the bits of a word.
  mask = _pad_lanes(mask, False)
  *rows, width = mask.shape
  # Sums and scatters run over words of 32 slots, not over slots.
  bits = mask.reshape(*rows, width // _WORD, _WORD).astype(jnp.uint32)
  bits <<= _slots(bits.shape).astype(jnp.uint32)
  # Each slot has a bit of its own, so the sum is a bitwise or.
  words = jnp.sum(bits, axis=-1, dtype=jnp.uint32)
  ones = jax.lax.population_count(words).astype(jnp.int32)
  ends = jnp.cumsum(ones, axis=-1)
  starts = ends - ones
  # Each place of the list belongs to the last word that starts at or before it.
  # An empty word starts where the next one does and must not compete with it.
  word_index = _scatter_words(jnp.where(ones > 0, starts, size), size)
  word_index = _max_before(word_index, _WORD)
  place = _slots(word_index.shape)
  rank = place - jnp.take_along_axis(starts, word_index, axis=-1)
  word = jnp.take_along_axis(words, word_index, axis=-1)
  slots = word_index * _WORD + _nth_bit(word, rank)
  return jnp.where(place < ends[..., -1:], slots, -1)


def _few_largest(
  scores: Float[Array, "*B T"], wanted: Int[Array, "*B 1"], size: int
) -> Int[Array, "*B M"]:
  """Finds each of the largest scores by two reductions."""
  keys = ordered(scores)
  slots = _slots(keys.shape)
  end = slots.shape[-1]
  found = []
  for number in range(size):
    best = jnp.max(keys, axis=-1, keepdims=True)
    # The lowest of equal scores.
    slot = jnp.min(jnp.where(keys == best, slots, end), axis=-1, keepdims=True)
    found.append(jnp.where((best > NEVER) & (number < wanted), slot, end))
    keys = jnp.where(slots == slot, NEVER, keys)
  return _ascending(jnp.concatenate(found, axis=-1), size, end)


def _max_before(x: Int[Array, "*B M"], width: int) -> Int[Array, "*B M"]:
  """Computes the maximum of each number and the `width` - 1 before it.

  XLA vectorizes maxima of shifted rows, unlike `lax.cummax`.

  Args:
    x: numbers that are not negative.
    width: a power of 2.
  """
  shift = 1
  while shift < width:
    before = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(shift, 0)])
    x = jnp.maximum(x, before[..., : x.shape[-1]])
    shift *= 2
  return x


def kth_largest_xla(
  scores: Float[Array, "*B T"], counts: Int[Array, "*B"]
) -> Float[Array, "*B"]:
  """Computes `kvjax.kernels.select.kth_largest`."""
  among = among_largest_xla(scores, counts)
  return jnp.min(scores, axis=-1, initial=jnp.inf, where=among)


def slots_to_mask_xla(
  lists: Int[Array, "*B M"], slots: int
) -> Bool[Array, "*B T"]:
  """Computes `kvjax.kernels.select.slots_to_mask`."""

  def mark(listed: Int[Array, " M"]) -> Bool[Array, " T"]:
    # Negative indices would count from the end; T is out of bounds and dropped.
    at = jnp.where(listed >= 0, listed, slots)
    return jnp.zeros(slots, bool).at[at].set(True, mode="drop")

  marked: Array = jnp.vectorize(mark, signature="(m)->(t)")(lists)
  return marked


def _best_first(
  scores: Float[Array, "*B T"], wanted: Int[Array, "*B 1"]
) -> Int[Array, "*B T"]:
  """Lists the selected slots by descending score, padded with T."""
  keys = ordered(scores)
  slots = _slots(keys.shape)
  # `~` reverses the order; stable, so that the lower slot wins among equals.
  worst, best_first = jax.lax.sort((~keys, slots), num_keys=1, is_stable=True)
  chosen = (slots < wanted) & (~worst > NEVER)
  return jnp.where(chosen, best_first, slots.shape[-1])


def _ascending(
  slots: Int[Array, "*B N"], size: int, end: int
) -> Int[Array, "*B M"]:
  """Lists the lowest slots in ascending order; -1 replaces `end`."""
  first = jnp.sort(slots, axis=-1)[..., :size]
  return jnp.where(first < end, first, -1)


def _counter(scores: Float[Array, "*B T"]) -> Count:
  keys = _pad_lanes(ordered(scores), NEVER)
  *rows, width = keys.shape
  slots = _slots(keys.shape)
  # A lane counts width / 128 keys at most, which usually fits 16 bits.
  count_dtype = jnp.int16 if width < 2**15 * _LANES else jnp.int32

  def count(predicate: Callable[[Array, Array], Array]) -> Rows:
    lanes = predicate(keys, slots).astype(count_dtype)
    lanes = lanes.reshape(*rows, width // _LANES, _LANES)
    lanes = jnp.sum(lanes, axis=-2, dtype=count_dtype).astype(jnp.int32)
    return jnp.sum(lanes, axis=-1, keepdims=True)

  return count


def _scatter_words(places: Int[Array, "*B W"], size: int) -> Int[Array, "*B M"]:
  """Scatters word numbers to their places, dropping places beyond `size`."""

  def put(places: Int[Array, " W"]) -> Int[Array, " M"]:
    zeros = jnp.zeros(size, jnp.int32)
    return zeros.at[places].set(_slots(places.shape), mode="drop")

  placed: Array = jnp.vectorize(put, signature="(w)->(m)")(places)
  return placed


def _nth_bit(
  words: UInt[Array, "*B M"], rank: Int[Array, "*B M"]
) -> Int[Array, "*B M"]:
  """Finds the one-bit of each word that has `rank` ones below it."""
  at = jnp.zeros_like(rank)
  half = _WORD // 2
  while half:
    # The bit is in the upper half if the lower half has too few ones.
    lower = words & jnp.uint32((1 << half) - 1)
    ones = jax.lax.population_count(lower).astype(jnp.int32)
    beyond = rank >= ones
    at = jnp.where(beyond, at + half, at)
    rank = jnp.where(beyond, rank - ones, rank)
    words = jnp.where(beyond, words >> half, words)
    half //= 2
  return at


def _slots(shape: tuple[int, ...]) -> Int[Array, "*B T"]:
  """Returns the indices along the last axis."""
  return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)


def _pad_lanes(x: Array, value: int | bool) -> Array:
  """Pads the last axis to a multiple of the lanes."""
  padding = -x.shape[-1] % _LANES
  widths = [(0, 0)] * (x.ndim - 1) + [(0, padding)]
  return jnp.pad(x, widths, constant_values=value)
