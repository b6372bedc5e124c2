"""Clustering of keys: prototypes, hashes and K-means."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

Hash = Literal["fourier", "hyperplane"]
Sigma = Literal["median", "sqrt_d", "one"]
Split = Literal["balanced", "ceil_len"]
# Iterations of K-means, whether a key moved in the last one, the cluster of
# every key, and the centers with those that exist.
_Fit = tuple[
  Int[Array, ""],
  Bool[Array, ""],
  Int[Array, " T"],
  tuple[Float[Array, "P D"], Bool[Array, " P"]],
]

# Keys at a time: their cosines with 500 centers, or they and the sums of their
# neighbors, then stay in the caches of a processor.
_TILE = 256
_EPSILON = 1e-6
# Mean cosines that differ by less than this share of the largest are ties.
_ROUNDING = 1e-5


def unit(x: Float[Array, "*A D"]) -> Float[Array, "*A D"]:
  """Scales rows to length 1; zero rows stay zero."""
  length = jnp.linalg.norm(x, axis=-1, keepdims=True)
  return x / jnp.where(length > 0, length, 1.0)


def deviation(
  keys: Float[Array, "T D"],
  prefix: Bool[Array, " T"],
  reach: int,
  include_self: bool,
) -> Float[Array, " T"]:
  """Computes the dissimilarity of keys to their neighbors.

  It is the negative mean cosine with the keys at most `reach` places away,
  standardized over the prefix. Deviations that may be rounding are set to 0.
  """
  likeness = _likeness(keys, prefix, reach, include_self)
  size = jnp.maximum(jnp.sum(prefix.astype(jnp.float32)), 1.0)
  mean = jnp.sum(jnp.where(prefix, likeness, 0.0)) / size
  centered = jnp.where(prefix, likeness - mean, 0.0)
  # If all keys are equal, they differ by rounding only, which must not choose
  # the anchors. Without it, ties prefer the first keys.
  noise = _ROUNDING * jnp.max(jnp.abs(likeness), where=prefix, initial=0.0)
  centered = jnp.where(jnp.abs(centered) <= noise, 0.0, centered)
  spread = jnp.sqrt(jnp.sum(centered * centered) / size)
  # The note on ProtoKV has an outlier degree that is low for outliers.
  return -centered / jnp.maximum(spread, _EPSILON)


def _likeness(
  keys: Float[Array, "T D"],
  prefix: Bool[Array, " T"],
  reach: int,
  include_self: bool,
) -> Float[Array, " T"]:
  """Computes the mean cosine of each key with its neighbors, tile by tile."""
  length = len(keys)
  reach, tile = min(reach, length), min(_TILE, length)
  around = jnp.arange(-reach, tile + reach, dtype=jnp.int32)

  def of_tile(start: Int[Array, ""]) -> Float[Array, " C"]:
    place = start + around
    inside = jnp.clip(place, 0, length - 1)
    real = ((place == inside) & prefix[inside])[:, None]

    def near(x: Float[Array, "R X"]) -> Float[Array, "C X"]:
      total = jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (2 * reach + 1, 1), (1, 1), "VALID"
      )
      return total if include_self else total - x[reach : reach + tile]

    # Zero vectors have a cosine of 0 with every key: they add to no sum.
    units = unit(jnp.where(real, keys[inside], 0.0))
    # Products are linear: one with the sum of the neighbors has all cosines.
    total = jnp.sum(units[reach : reach + tile] * near(units), axis=1)
    # By the neighbors that exist: the constant 2 kappa + 1, as in the note on
    # ProtoKV, would make the keys at both ends look deviant.
    return total / jnp.maximum(near(real.astype(jnp.float32))[:, 0], 1.0)

  starts = jnp.arange(0, length, tile, dtype=jnp.int32)
  return jax.lax.map(of_tile, starts).reshape(-1)[:length]


def buckets(
  keys: Float[Array, "T D"],
  candidates: Int[Array, " p"],
  valid: Bool[Array, " p"],
  rng: PRNGKeyArray,
  bits: int,
  kind: Hash,
  sigma: Sigma,
) -> Int[Array, " T"]:
  """Hashes every key to one of `2**bits` buckets, locality-sensitively.

  It uses random Fourier features with bandwidth sigma, or random hyperplanes. A
  bit is the sign of a feature; the first feature is the highest bit.

  Args:
    keys: float32 keys.
    candidates: slots for the median distance.
    valid: mask of the candidates that count.
    rng: random key for directions and phases.
    bits: r.
    kind: kind of the hash.
    sigma: bandwidth: median distance of the candidates, sqrt(D) or 1.
  """
  dim = keys.shape[1]
  direction_key, phase_key = jax.random.split(rng)
  directions = jax.random.normal(direction_key, (bits, dim), jnp.float32)
  # Directions from N(0, 1 / sigma^2) are these divided by sigma, as below. The
  # factor sqrt(2 / r) of the features is left out: only signs count.
  projected = keys @ directions.T
  if kind == "fourier":
    width = {
      "median": lambda: _median_distance(keys[candidates], valid),
      "sqrt_d": lambda: jnp.float32(dim**0.5),
      "one": lambda: jnp.float32(1.0),
    }[sigma]()
    phases = jax.random.uniform(
      phase_key, (1, bits), jnp.float32, maxval=2 * jnp.pi
    )
    projected = jnp.cos(projected / width + phases)
    ones = projected >= 0
  else:
    ones = projected > 0
  weights = 2 ** jnp.arange(bits - 1, -1, -1, dtype=jnp.int32)
  codes = ones.astype(jnp.int32) * weights[None]
  return jnp.sum(codes, axis=1, dtype=jnp.int32)


def _median_distance(
  points: Float[Array, "p D"], valid: Bool[Array, " p"]
) -> Float[Array, ""]:
  """Median distance of all pairs; 1 if there is none or it is 0."""
  distances = jnp.linalg.norm(points[:, None] - points[None], axis=-1)
  pairs = jnp.triu(valid[:, None] & valid[None], 1)
  # There is no median with a mask; NaN takes its part.
  median = jnp.nanmedian(jnp.where(pairs, distances, jnp.nan))
  return jnp.where(jnp.isfinite(median) & (median > 0), median, 1.0)


def chunks(
  members: Bool[Array, " T"], num_chunks: Int[Array, ""], split: Split
) -> Int[Array, " T"]:
  """Splits the members, in order, into `num_chunks` contiguous chunks.

  "balanced" sizes differ by at most one. "ceil_len" chunks have the rounded-up
  mean size, except for the last. Slots that are not members get -1.
  """
  rank = jnp.cumsum(members, dtype=jnp.int32) - 1
  size = jnp.maximum(jnp.sum(members, dtype=jnp.int32), 1)
  num_chunks = jnp.maximum(num_chunks, 1)
  if split == "balanced":
    # rank * num_chunks // size by two halves of num_chunks, as the product has
    # more than 32 bits. These do not, up to 2^20 members and chunks.
    high, low = num_chunks >> 10, num_chunks & 1023
    quotient, remainder = jnp.divmod(rank * high, size)
    chunk = (quotient << 10) + ((remainder << 10) + rank * low) // size
  else:
    chunk = rank // -(-size // num_chunks)
  return jnp.where(members, chunk, -1)


def prototypes(
  keys: Float[Array, "T D"], groups: Int[Array, " T"], count: int
) -> tuple[Float[Array, "P D"], Bool[Array, " P"]]:
  """Computes the direction of each group's sum of keys, and which exist.

  Args:
    keys: float32 keys.
    groups: group of every key, -1 for none.
    count: P, number of groups.
  """
  # Keys without a group go to an extra one, which is cut off.
  target = jnp.where(groups >= 0, groups, count)
  length = len(keys)
  tile = min(_TILE, length)

  def add(
    number: Int[Array, ""], sums: Float[Array, "_ D"]
  ) -> Float[Array, "_ D"]:
    # The last tile begins earlier, with keys that have been added.
    start = jnp.minimum(number * tile, length - tile)
    of_tile = jax.lax.dynamic_slice_in_dim(target, start, tile)
    new = start + jnp.arange(tile, dtype=jnp.int32) >= number * tile
    part = jax.lax.dynamic_slice_in_dim(keys, start, tile)
    return sums.at[jnp.where(new, of_tile, count)].add(part)

  # In tiles, as XLA copies whatever it scatters.
  sums = jnp.zeros((count + 1, keys.shape[1]), jnp.float32)
  sums = jax.lax.fori_loop(0, -(-length // tile), add, sums)[:count]
  ones = jnp.ones(groups.shape, jnp.float32)
  sizes = jax.ops.segment_sum(ones, target, count + 1)[:count]
  lengths = jnp.linalg.norm(sums, axis=1, keepdims=True)
  return sums / jnp.maximum(lengths, _EPSILON), sizes > 0


def nearest(
  keys: Float[Array, "T D"],
  centers: Float[Array, "P D"],
  exists: Bool[Array, " P"],
) -> Int[Array, " T"]:
  """Finds the center with the highest cosine for every key.

  Ties prefer the lowest center. It works in tiles of keys, so that the T x P
  cosines never exist at once.
  """
  length, last = len(keys), len(centers) - 1
  tile = min(_TILE, length)
  places = jnp.arange(len(centers), dtype=jnp.int32)
  # A group without members has the zero vector for its center, which would win
  # over negative cosines: the first one that exists stands in for it.
  first = jnp.argmax(exists).astype(jnp.int32)
  named = jnp.where(exists, places, first)
  centers = centers[named]

  def assign(start: Int[Array, ""]) -> Int[Array, " C"]:
    # A slice, since tiles that are mapped would be a copy of the keys.
    part = jax.lax.dynamic_slice_in_dim(keys, start, tile)
    # The length of a key does not change which center is nearest. Centers
    # come first, as XLA vectorizes reductions over the first axis.
    cosines = centers @ part.T
    # As `argmax` does, but in two reductions, which XLA vectorizes.
    best = jnp.max(cosines, axis=0, keepdims=True)
    return jnp.min(jnp.where(cosines == best, places[:, None], last), axis=0)

  starts = jnp.arange(0, length, tile, dtype=jnp.int32)
  # The last tile begins earlier, with keys of the one before.
  *_, final = range(0, length, tile)
  found = jax.lax.map(assign, jnp.minimum(starts, length - tile))
  found = jnp.concatenate([found[:-1].reshape(-1), found[-1, final - length :]])
  return named[found]


def kmeans(
  keys: Float[Array, "T D"],
  valid: Bool[Array, " T"],
  rng: PRNGKeyArray,
  count: int,
  iterations: int,
  wanted: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "P D"], Bool[Array, " P"]]:
  """Spherical K-means with a K-means++ start; centers from raw members.

  Args:
    keys: float32 keys.
    valid: mask of the keys that count.
    rng: random key for the start.
    count: P, number of centers.
    iterations: maximum number; it stops when no key changes its cluster.
    wanted: number of centers to use, the first ones; None for all of them.

  Returns:
    The directions of the centers, and which have members.
  """
  units = unit(jnp.where(valid[:, None], keys, 0.0))
  first_key, rest_key = jax.random.split(rng)

  def pick(rng: PRNGKeyArray, weights: Float[Array, " T"]) -> Int[Array, ""]:
    # The floor leaves something to draw where every key is a center already.
    logits = jnp.where(valid, jnp.log(jnp.maximum(weights, 1e-30)), -jnp.inf)
    return jax.random.categorical(rng, logits)

  def squared_distances(center: Float[Array, " D"]) -> Float[Array, " T"]:
    # Of unit vectors.
    return jnp.maximum(2.0 - 2.0 * (units @ center), 0.0)

  def seed(
    nearest_so_far: Float[Array, " T"], rng: PRNGKeyArray
  ) -> tuple[Float[Array, " T"], Float[Array, " D"]]:
    center = units[pick(rng, nearest_so_far)]
    return jnp.minimum(nearest_so_far, squared_distances(center)), center

  start = units[pick(first_key, jnp.ones(len(keys), jnp.float32))]
  _, rest = jax.lax.scan(
    seed, squared_distances(start), jax.random.split(rest_key, count - 1)
  )
  centers = jnp.concatenate([start[None], rest])
  exists = jnp.ones(count, bool)
  if wanted is not None:
    # The others are drawn as well, since P is static, but get no members.
    exists = jnp.arange(count, dtype=jnp.int32) < wanted

  def unfinished(state: _Fit) -> Bool[Array, ""]:
    step, moved, _, _ = state
    return moved & (step < iterations)

  def refine(state: _Fit) -> _Fit:
    step, _, before, centers = state
    # A center that loses its members does not come back.
    groups = jnp.where(valid, nearest(keys, *centers), -1)
    moved = jnp.any(groups != before)
    return step + 1, moved, groups, prototypes(keys, groups, count)

  step, moved = jnp.zeros((), jnp.int32), jnp.ones((), bool)
  groups = jnp.full(valid.shape, -1, jnp.int32)
  begin = step, moved, groups, (centers, exists)
  return jax.lax.while_loop(unfinished, refine, begin)[-1]
