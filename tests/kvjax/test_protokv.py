"""ProtoKV, step by step, against plain loops in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.layers import LayerCache
from kvjax.methods import Allowance, ProtoKV, get_method
from kvjax.methods import prototypes as proto
from kvjax.testing import random_activations

N, K, D = 4, 2, 8
LENGTH, PADDED, WINDOW = 70, 80, 8
PREFIX = LENGTH - WINDOW


@pytest.fixture(scope="module")
def seen():
  return random_activations(31, [LENGTH], PADDED)


def keys_of(seen, head=0):
  return np.asarray(seen.keys, np.float64)[0, head, :LENGTH]


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def prefix_mask():
  return jnp.arange(PADDED) < PREFIX


def clean(seen, head=0):
  return jnp.nan_to_num(seen.keys[0, head])


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reach", [1, 5, 100])
def test_deviation(seen, reach, include_self):
  units = unit(keys_of(seen)[:PREFIX])
  likeness = []
  for i in range(PREFIX):
    near = range(max(0, i - reach), min(PREFIX, i + reach + 1))
    near = [j for j in near if include_self or j != i]
    likeness.append(np.mean([units[i] @ units[j] for j in near]))
  likeness = np.array(likeness)
  expected = -(likeness - likeness.mean()) / likeness.std()
  ours = proto.deviation(clean(seen), prefix_mask(), reach, include_self)
  np.testing.assert_allclose(ours[:PREFIX], expected, rtol=0, atol=1e-4)


def test_deviation_of_equal_keys_is_zero():
  keys = jnp.ones((PADDED, D))
  ours = proto.deviation(keys, prefix_mask(), 5, True)
  np.testing.assert_allclose(ours, 0, atol=0.2)


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


def test_chunks_of_one_length():
  members = jnp.arange(PADDED) < 23
  ours = np.asarray(proto.chunks(members, jnp.asarray(5), "ceil_len"))
  assert np.bincount(ours[:23]).tolist() == [5, 5, 5, 5, 3]


def test_prototypes_are_directions_of_summed_keys(seen):
  groups = jnp.where(prefix_mask(), jnp.arange(PADDED) % 5, -1)
  centers, exists = proto.prototypes(clean(seen), groups, 7)
  for group in range(5):
    total = keys_of(seen)[:PREFIX][np.arange(PREFIX) % 5 == group].sum(axis=0)
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


def test_buckets_read_their_bits_from_the_highest():
  keys = jnp.asarray(np.random.default_rng(1).normal(size=(400, D)), "float32")
  rng = jax.random.key(0)
  none = jnp.zeros(1, jnp.int32), jnp.zeros(1, bool)
  ours = np.asarray(proto.buckets(keys, *none, rng, 3, "hyperplane", "one"))
  planes = jax.random.normal(jax.random.split(rng)[0], (3, D))
  bits = (np.asarray(keys) @ np.asarray(planes).T > 0).astype(int)
  np.testing.assert_array_equal(ours, bits @ [4, 2, 1])
  fourier = proto.buckets(keys, *none, rng, 2, "fourier", "sqrt_d")
  assert set(np.unique(fourier)) <= {0, 1, 2, 3}


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


def ranking(seen, method):
  return method.evaluate(0, LayerCache.of(seen), seen)


def select(seen, method, budget):
  cache = LayerCache.of(seen)
  slots = method.select(
    ranking(seen, method), cache, Allowance(jnp.asarray([budget]), budget)
  )
  return [[int(i) for i in head if i >= 0] for head in slots[0]]


def own_scores(seen, head, attention):
  """What the window's queries of the group give each prefix token."""
  total = np.zeros(PREFIX)
  k = keys_of(seen, head)
  for j in range(N):
    if j * K // N != head:
      continue
    q = np.asarray(seen.queries, np.float64)[0, j]
    for m in range(PREFIX, LENGTH):
      logits = k[: m + 1] @ q[m]
      if attention:
        row = np.exp(logits / np.sqrt(D))
        total += (row / row.sum())[:PREFIX]
      else:
        total += logits[:PREFIX]
  return total


@pytest.mark.parametrize(
  "score", ["qk_sum", "qk_mean", "attn_sum", "attn_mean"]
)
def test_clusters_are_kept_best_first_and_the_last_is_cut(seen, score):
  method = ProtoKV(anchors=0, prototypes=9, score=score)
  budget = 40
  kept = select(seen, method, budget)
  for head in range(K):
    k = keys_of(seen, head)[:PREFIX]
    chunk = np.arange(PREFIX) * 9 // PREFIX
    centers = unit(np.array([k[chunk == c].sum(axis=0) for c in range(9)]))
    cluster = (unit(k) @ centers.T).argmax(axis=1)
    own = own_scores(seen, head, score.startswith("attn"))
    reduce = np.mean if score.endswith("mean") else np.sum
    # An empty cluster has nothing to sum and nothing to keep.
    worth = [
      reduce(own[cluster == c]) if np.any(cluster == c) else 0.0
      for c in range(9)
    ]
    expected = []
    for c in np.argsort(-np.array(worth)):
      members = np.flatnonzero(cluster == c)
      room = budget - WINDOW - len(expected)
      if len(members) > room:
        best = np.argsort(-own[members])[:room]
        expected += members[best].tolist()
        break
      expected += members.tolist()
    assert kept[head] == sorted(expected) + list(range(PREFIX, LENGTH))


@pytest.mark.parametrize("bits", [0, 2])
@pytest.mark.parametrize("budget", [9, 30, 50])
def test_anchors_and_chunks_together(seen, bits, budget):
  """The whole method in loops; only the hash, which is random, is ours."""
  anchors, total = 6, 12
  method = ProtoKV(anchors=anchors, bits=bits, prototypes=total, seed=4)
  kept = select(seen, method, budget)
  for head in range(K):
    rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(4), 0), head)
    k = keys_of(seen, head)[:PREFIX]
    units = unit(k)
    likeness = np.array(
      [
        np.mean([units[i] @ units[j] for j in range(PREFIX) if abs(i - j) < 6])
        for i in range(PREFIX)
      ]
    )
    candidates = np.argsort(likeness, kind="stable")[:anchors]
    hashed = np.asarray(
      proto.buckets(
        clean(seen, head),
        jnp.asarray(candidates),
        jnp.ones(anchors, bool),
        rng,
        bits,
        "fourier",
        "median",
      )
    )
    rest = [i for i in range(PREFIX) if i not in candidates]
    plain = total - 2**bits
    groups = [[] for _ in range(total)]
    for rank, i in enumerate(rest):
      groups[rank * plain // len(rest)].append(i)
    for i in candidates:
      groups[plain + hashed[i]].append(i)
    cosines = np.full((PREFIX, total), -np.inf)
    for group, members in enumerate(groups):
      if members:
        cosines[:, group] = units @ unit(k[members].sum(axis=0))
    cluster = cosines.argmax(axis=1)
    own = own_scores(seen, head, attention=False)
    worth = [own[cluster == c].sum() for c in range(total)]
    order = [
      i
      for c in np.argsort(-np.array(worth), kind="stable")
      for i in sorted(np.flatnonzero(cluster == c), key=lambda i: -own[i])
    ]
    expected = sorted(order[: budget - WINDOW])
    assert kept[head] == expected + list(range(PREFIX, LENGTH))


@pytest.mark.parametrize("cut", ["position", "skip", "none"])
def test_cuts(seen, cut):
  method = ProtoKV(anchors=0, prototypes=9, cut=cut)
  budget = 40
  kept = select(seen, method, budget)
  found = ranking(seen, method)
  for head in range(K):
    cluster = np.asarray(found.cluster)[0, head, :PREFIX]
    sizes = np.bincount(cluster, minlength=9)
    room, expected = budget - WINDOW, []
    for c in range(9):
      members = np.flatnonzero(cluster == c).tolist()
      if sizes[c] <= room:
        expected += members
        room -= sizes[c]
      elif cut == "position":
        expected += members[:room]
        break
      elif cut == "none":
        break
    assert kept[head] == sorted(expected) + list(range(PREFIX, LENGTH))


@pytest.mark.parametrize("name", ["paper", "chunk", "lsh", "kmeans", "sat"])
def test_every_prefix_token_has_one_place(seen, name):
  method = get_method(f"protokv.{name}:prototypes=12:iterations=2")
  found = ranking(seen, method)
  for head in range(K):
    place = np.asarray(found.place)[0, head]
    assert sorted(place[:PREFIX]) == list(range(PREFIX))
    assert np.all(place[PREFIX:] == PADDED)
    assert int(np.sum(found.sizes[0, head])) == PREFIX
  for budget in (9, 20, 41, 70):
    assert [len(head) for head in select(seen, method, budget)] == [budget] * K


def test_sat_ranks_tokens_by_deviation(seen):
  kept = select(seen, get_method("protokv.sat"), 20)
  for head in range(K):
    dev = proto.deviation(clean(seen, head), prefix_mask(), 5, True)
    best = np.argsort(-np.asarray(dev)[:PREFIX], kind="stable")[:12]
    assert kept[head] == sorted(best.tolist()) + list(range(PREFIX, LENGTH))


def test_assignment_ignores_the_scale_of_keys(seen):
  scaled = dataclasses.replace(seen, keys=seen.keys * 3)
  method = ProtoKV(prototypes=12)
  one, two = (ranking(x, method).cluster for x in (seen, scaled))
  np.testing.assert_array_equal(one, two)


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
  ("options", "said"),
  [
    ({"window": 0}, "window must be 1 or more"),
    ({"bits": 9}, "leave none of 500"),
    ({"bits": -1}, "bits must be 0 or more"),
    ({"prototypes": 1}, "prototypes must be 2 or more"),
  ],
)
def test_wrong_options_are_explained(options, said):
  with pytest.raises(InputError, match=said):
    ProtoKV(**options)
