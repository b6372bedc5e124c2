"""Prototypes, chunks, hashes and clusters of keys against float64 loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import clustering as proto

D, PADDED, PREFIX = 8, 80, 62
KEYS = np.random.default_rng(31).normal(size=(PADDED, D)).astype(np.float32)


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


deviation = jax.jit(proto.deviation, static_argnums=(2, 3))


def prefix_mask():
  return jnp.arange(PADDED) < PREFIX


@pytest.mark.slow
@pytest.mark.parametrize("tile", [7, 256])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reach", [1, 5, 100])
def test_deviation(monkeypatch, reach, include_self, tile):
  monkeypatch.setattr(proto, "_TILE", tile)
  units = unit(KEYS[:PREFIX].astype(np.float64))
  likeness = []
  for i in range(PREFIX):
    near = range(max(0, i - reach), min(PREFIX, i + reach + 1))
    near = [j for j in near if include_self or j != i]
    likeness.append(np.mean([units[i] @ units[j] for j in near]))
  likeness = np.array(likeness)
  expected = -(likeness - likeness.mean()) / likeness.std()
  ours = jax.jit(lambda *x: proto.deviation(*x, reach, include_self))(
    jnp.asarray(KEYS), prefix_mask()
  )
  np.testing.assert_allclose(ours[:PREFIX], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("length", [PADDED, 4096])
def test_deviation_of_equal_directions_is_zero(length, include_self):
  """Not what rounding made of it, divided by its spread."""
  rng = np.random.default_rng(5)
  keys = rng.normal(size=D) * rng.uniform(0.1, 10, (length, 1))
  prefix = jnp.arange(length) < length - 18
  ours = deviation(jnp.asarray(keys, jnp.float32), prefix, 5, include_self)
  np.testing.assert_array_equal(np.abs(ours), 0)


@pytest.mark.parametrize("count", [1, 7, 62, 100])
def test_balanced_chunks(count):
  members = np.zeros(PADDED, bool)
  members[:PREFIX] = True
  members[[3, 10, 11]] = False
  size = members.sum()
  ours = np.asarray(
    proto.chunks(
      jnp.asarray(members), jnp.asarray(min(count, size)), "balanced"
    )
  )
  assert np.all(ours[~members] == -1)
  expected = [rank * min(count, size) // size for rank in range(size)]
  assert ours[members].tolist() == expected
  lengths = np.bincount(ours[members])
  assert lengths.max() - lengths.min() <= 1


@pytest.mark.parametrize("size", [200_000, 2**20 - 1])
@pytest.mark.parametrize("count", [500, 20_000, 2**17])
def test_chunks_of_long_prompts_do_not_overflow(size, count):
  members = jnp.ones(size, bool)
  ours = proto.chunks(members, jnp.asarray(count), "balanced")
  expected = np.arange(size, dtype=np.int64) * count // size
  np.testing.assert_array_equal(ours, expected)


def test_chunks_of_one_length():
  members = jnp.arange(PADDED) < 23
  ours = np.asarray(proto.chunks(members, jnp.asarray(5), "ceil_len"))
  assert np.bincount(ours[:23]).tolist() == [5, 5, 5, 5, 3]


def test_prototypes_are_directions_of_summed_keys():
  groups = jnp.where(prefix_mask(), jnp.arange(PADDED) % 5, -1)
  centers, exists = proto.prototypes(jnp.asarray(KEYS), groups, 7)
  for group in range(5):
    total = KEYS[:PREFIX][np.arange(PREFIX) % 5 == group].sum(axis=0)
    np.testing.assert_allclose(centers[group], unit(total), atol=1e-5)
  assert exists.tolist() == [True] * 5 + [False] * 2


def test_nearest_by_cosine_and_lowest_of_equals(monkeypatch):
  rng = np.random.default_rng(0)
  keys, centers = rng.normal(size=(50, D)), unit(rng.normal(size=(6, D)))
  centers[4] = centers[1]
  exists = np.array([1, 1, 0, 1, 1, 1], bool)
  cosines = np.where(exists[None], unit(keys) @ centers.T, -np.inf)
  args = [jnp.asarray(x, jnp.float32) for x in (keys, centers)]
  for tile in (7, 1024):
    monkeypatch.setattr(proto, "_TILE", tile)
    ours = proto.nearest(*args, jnp.asarray(exists))
    np.testing.assert_array_equal(ours, cosines.argmax(axis=1))
    assert not np.any(np.isin(ours, [2, 4]))


NOTHING = jnp.zeros(1, jnp.int32), jnp.zeros(1, bool)


def test_buckets_read_their_bits_from_the_highest():
  keys = jnp.asarray(np.random.default_rng(1).normal(size=(400, D)), "float32")
  rng = jax.random.key(0)
  ours = np.asarray(proto.buckets(keys, *NOTHING, rng, 3, "hyperplane", "one"))
  planes = jax.random.normal(jax.random.split(rng)[0], (3, D))
  bits = (np.asarray(keys) @ np.asarray(planes).T > 0).astype(int)
  np.testing.assert_array_equal(ours, bits @ [4, 2, 1])


@pytest.mark.parametrize(
  ("valid", "width", "sigma"),
  [
    ([1, 1, 1, 1, 1, 0], "median", None),
    ([1, 0, 0, 0, 0, 0], "median", 1.0),  # no pair
    ([1, 0, 0, 0, 0, 1], "median", 1.0),  # a pair of equal keys
    ([1] * 6, "sqrt_d", D**0.5),
    ([1] * 6, "one", 1.0),
  ],
)
def test_fourier_features(valid, width, sigma):
  """phi = sqrt(2 / r) cos(W k + t), W of variance 1 / sigma^2, by the formula.

  The draws are ours: standard normals from the first half of the seed, phases
  uniform up to 2 pi from the second.
  """
  rng, r = np.random.default_rng(1), 3
  keys = rng.normal(size=(400, D)) * 3
  slots = [3, 50, 51, 7, 300, 399]
  keys[399] = keys[3]
  seed = jax.random.key(8)
  ours = proto.buckets(
    jnp.asarray(keys, jnp.float32),
    jnp.asarray(slots),
    jnp.asarray(valid, bool),
    seed,
    r,
    "fourier",
    width,
  )
  if sigma is None:
    points = [keys[i] for i, v in zip(slots, valid, strict=True) if v]
    pairs = itertools.combinations(points, 2)
    sigma = np.median([np.linalg.norm(a - b) for a, b in pairs])
  first, second = jax.random.split(seed)
  normals = np.asarray(jax.random.normal(first, (r, D)), np.float64)
  turns = jax.random.uniform(second, (1, r), maxval=2 * jnp.pi)
  phases = np.asarray(turns, np.float64)[0]
  assert phases.max() > np.pi
  for key, bucket in zip(keys, ours, strict=True):
    phi = np.sqrt(2 / r) * np.cos(normals / sigma @ key + phases)
    assert np.abs(phi).min() > 1e-6
    assert bucket == sum(2 ** (r - 1 - i) for i in range(r) if phi[i] >= 0)
  assert len(set(np.asarray(ours).tolist())) >= 4


def test_strangers_are_anchors_and_share_a_bucket():
  """20 identical far-off keys among smooth ones (methods of the paper)."""
  rng = np.random.default_rng(2)
  smooth = np.cumsum(rng.normal(size=(PADDED, D)) * 0.05, axis=0) + 3
  strangers = rng.choice(PREFIX // 3, 20, replace=False) * 3
  smooth[strangers] = -4 * np.ones(D) + 8 * (np.arange(D) % 2)
  keys = jnp.asarray(smooth, jnp.float32)
  dev = np.asarray(proto.deviation(keys, prefix_mask(), 5, True))
  assert set(np.argsort(-dev[:PREFIX])[:20]) == set(strangers)
  slots = jnp.asarray(np.sort(strangers))
  hashed = proto.buckets(
    keys, slots, jnp.ones(20, bool), jax.random.key(1), 2, "fourier", "median"
  )
  assert len(set(np.asarray(hashed)[strangers].tolist())) == 1


def test_kmeans_finds_clear_clusters():
  rng = np.random.default_rng(3)
  truth = rng.integers(0, 4, PADDED)
  keys = np.eye(D)[truth] * 5 + rng.normal(size=(PADDED, D)) * 0.1
  keys = jnp.asarray(keys, jnp.float32)
  centers, exists = proto.kmeans(keys, prefix_mask(), jax.random.key(0), 4, 5)
  ours = np.asarray(proto.nearest(keys, centers, exists))[:PREFIX]
  pairs = {(int(a), int(b)) for a, b in zip(ours, truth[:PREFIX], strict=True)}
  assert len(pairs) == 4


@pytest.mark.parametrize(
  "run",
  [
    lambda keys, groups: deviation(keys, groups >= 0, 5, True),
    lambda keys, groups: proto.prototypes(keys, groups, 64),
    lambda keys, groups: proto.nearest(keys, keys[:64], groups[:64] >= 0),
  ],
  ids=["deviations", "prototypes", "nearest"],
)
def test_keys_are_not_copied(run):
  keys = jax.ShapeDtypeStruct((8, 16384, 128), jnp.float32)
  groups = jax.ShapeDtypeStruct((8, 16384), jnp.int32)
  compiled = jax.jit(jax.vmap(run)).lower(keys, groups).compile()
  used = compiled.memory_analysis().temp_size_in_bytes
  assert used < 8 * 16384 * 128 * 4 / 2


@pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
def test_tiles_of_keys_count_once(length):
  """Sums and nearest centers of whole tiles and of the last, shorter one."""
  rng = np.random.default_rng(length)
  keys = rng.normal(size=(length, 8)).astype("float32")
  groups = rng.integers(-1, 6, size=length).astype("int32")
  groups[groups == 2] = -1  # a group without members
  groups[groups == 0] = -1  # the first as well
  centers, exists = jax.jit(proto.prototypes, static_argnums=2)(keys, groups, 6)
  assert np.array_equal(exists, [number in groups for number in range(6)])
  sums = [keys[groups == n].astype("float64").sum(axis=0) for n in range(6)]
  lengths = np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-6)
  np.testing.assert_allclose(centers, sums / lengths, atol=1e-5)
  cosines = keys.astype("float64") @ np.asarray(centers, "float64").T
  cosines[:, ~np.asarray(exists)] = -np.inf
  found = jax.jit(proto.nearest)(keys, centers, exists)
  np.testing.assert_array_equal(found, cosines.argmax(axis=1))
