"""ProtoKV, step by step, against plain loops in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import clustering as proto
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.methods import LayerBudget, ProtoKV
from kvjax.registry.names import get_method
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


def clean(seen, head=0):
  return jnp.nan_to_num(seen.keys[0, head])


@functools.partial(jax.jit, static_argnums=1)
def ranking(seen, method):
  return method.evaluate(jnp.int32(0), LayerCache.of(seen), seen)


@functools.partial(jax.jit, static_argnums=2)
def chosen(found, seen, method, counts):
  """Slots of a prompt, of which the budgets leave some empty."""
  budget = LayerBudget(counts, PADDED)
  return method.select(found, LayerCache.of(seen), budget)


def select(seen, method, budget):
  counts = jnp.asarray([budget], jnp.int32)
  slots = np.asarray(chosen(ranking(seen, method), seen, method, counts))
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


def attention_of_means(seen, head, cluster, count):
  """What the queries would give a key that is the mean of its cluster."""
  k = keys_of(seen, head)[:PREFIX]
  sizes = np.bincount(cluster, minlength=count)
  means = np.zeros((count, D))
  for c in np.flatnonzero(sizes):
    means[c] = k[cluster == c].mean(axis=0)
  total = np.zeros(count)
  for j in range(head * N // K, (head + 1) * N // K):
    for q in np.asarray(seen.queries, np.float64)[0, j, PREFIX:LENGTH]:
      weights = np.exp(means @ q / np.sqrt(D))
      total += weights / (sizes * weights).sum()
  return np.where(sizes > 0, total, 0.0)


@pytest.mark.parametrize(
  "score", ["qk_sum", "qk_mean", "attn_sum", "attn_mean", "attn_center"]
)
def test_clusters_are_kept_best_first_and_the_last_is_cut(seen, score):
  method = ProtoKV(anchors=0, prototypes=9, tokens_per_prototype=1, score=score)
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
    if score == "attn_center":
      worth = attention_of_means(seen, head, cluster, 9)
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


def likeness_of(seen, head):
  """S, with 5 neighbors on either side."""
  units = unit(keys_of(seen, head)[:PREFIX])
  return np.array(
    [
      np.mean([units[i] @ units[j] for j in range(PREFIX) if abs(i - j) < 6])
      for i in range(PREFIX)
    ]
  )


def kept_by_hand(seen, method, head, candidates, budget):
  """From the candidates on; only the hash, which is random, is ours."""
  rng = jax.random.fold_in(jax.random.key(method.seed), 0)
  k = keys_of(seen, head)[:PREFIX]
  hashed = np.asarray(
    proto.buckets(
      clean(seen, head),
      jnp.asarray(candidates),
      jnp.ones(len(candidates), bool),
      jax.random.fold_in(rng, head),
      method.bits,
      "fourier",
      "median",
    )
  )
  total = method.prototypes
  rest = [i for i in range(PREFIX) if i not in candidates]
  # The last of them is short.
  enough = -(-len(rest) // method.tokens_per_prototype)
  plain = min(total - 2**method.bits, enough)
  groups = [[] for _ in range(total)]
  for rank, i in enumerate(rest):
    groups[rank * plain // len(rest)].append(i)
  for i in candidates:
    groups[plain + hashed[i]].append(i)
  cosines = np.full((PREFIX, total), -np.inf)
  for group, members in enumerate(groups):
    if members:
      cosines[:, group] = unit(k) @ unit(k[members].sum(axis=0))
  cluster = cosines.argmax(axis=1)
  own = own_scores(seen, head, method.score == "attn_sum")
  worth = [own[cluster == c].sum() for c in range(total)]
  order = [
    i
    for c in np.argsort(-np.array(worth), kind="stable")
    for i in sorted(np.flatnonzero(cluster == c), key=lambda i: -own[i])
  ]
  return sorted(order[: budget - WINDOW]) + list(range(PREFIX, LENGTH))


@pytest.mark.parametrize("sign", ["deviation", "literal"])
@pytest.mark.parametrize("bits", [0, 2])
@pytest.mark.parametrize(
  ("budget", "score", "tokens"),
  [(9, "qk_sum", 1), (30, "attn_sum", 6), (50, "qk_sum", 16)],
)
def test_anchors_and_chunks_together(seen, bits, budget, sign, score, tokens):
  """The least like their neighbors are anchors; literally the most like."""
  method = ProtoKV(
    anchors=6,
    bits=bits,
    prototypes=12,
    tokens_per_prototype=tokens,
    seed=4,
    sign=sign,
    score=score,
  )
  kept = select(seen, method, budget)
  for head in range(K):
    alike = likeness_of(seen, head)
    order = np.argsort(alike if sign == "deviation" else -alike)
    candidates = order[:6].tolist()
    expected = kept_by_hand(seen, method, head, candidates, budget)
    assert kept[head] == expected


def on_a_circle(seen):
  """Keys of any length that turn by the same angle from one to the next."""
  lengths = np.random.default_rng(6).uniform(0.5, 2, PADDED)
  keys = np.zeros((1, K, PADDED, D), np.float32)
  keys[..., 0] = lengths * np.cos(0.37 * np.arange(PADDED))
  keys[..., 1] = lengths * np.sin(0.37 * np.arange(PADDED))
  return dataclasses.replace(seen, keys=jnp.asarray(keys))


def test_where_all_are_as_like_their_neighbors_the_first_are_anchors(seen):
  seen = on_a_circle(seen)
  method = ProtoKV(
    neighbors=1, include_self=False, anchors=6, prototypes=12, seed=4
  )
  for budget in (20, 35, 50):
    kept = select(seen, method, budget)
    for head in range(K):
      first = list(range(6))
      assert kept[head] == kept_by_hand(seen, method, head, first, budget)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 5, 8])
def test_a_budget_within_the_window_keeps_the_newest(seen, budget):
  for name in ("protokv.paper", "protokv.sat"):
    kept = select(seen, get_method(f"{name}:prototypes=12"), budget)
    assert kept == [list(range(LENGTH - budget, LENGTH))] * K


@pytest.mark.parametrize("cut", ["position", "skip", "none"])
def test_cuts(seen, cut):
  method = ProtoKV(anchors=0, prototypes=9, tokens_per_prototype=1, cut=cut)
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
def test_every_prefix_token_is_of_one_cluster(seen, name):
  method = get_method(f"protokv.{name}:prototypes=12:iterations=2")
  found = ranking(seen, method)
  for head in range(K):
    sizes = np.asarray(found.sizes)[0, head]
    cluster = np.asarray(found.cluster)[0, head, :PREFIX]
    assert np.array_equal(np.bincount(cluster, minlength=len(sizes)), sizes)
    inside = np.asarray(found.inside)[0, head]
    assert np.array_equal(np.isfinite(inside), np.arange(PADDED) < PREFIX)
  for budget in (9, 20, 41, 70):
    assert [len(head) for head in select(seen, method, budget)] == [budget] * K


@pytest.mark.parametrize(
  ("method", "most"),
  [
    # 62 tokens of the prefix, of which 32 are candidates.
    (ProtoKV(), 4 + 2),
    (ProtoKV(anchors=0), 4),
    (ProtoKV(clusters="kmeans"), 4),
    (ProtoKV(anchors=0, prototypes=3), 3),
    (ProtoKV(anchors=0, tokens_per_prototype=1), 62),
  ],
)
def test_a_short_prompt_has_a_prototype_for_16_tokens(seen, method, most):
  sizes = np.asarray(ranking(seen, method).sizes)[0]
  found = np.sum(sizes > 0, axis=1)
  assert np.all((most - 2 <= found) & (found <= most))


@pytest.mark.parametrize("sign", ["deviation", "literal"])
def test_sat_ranks_tokens_by_deviation(seen, sign):
  kept = select(seen, get_method(f"protokv.sat:sign={sign}"), 20)
  for head in range(K):
    alike = likeness_of(seen, head)
    best = np.argsort(alike if sign == "deviation" else -alike)[:12]
    assert kept[head] == sorted(best.tolist()) + list(range(PREFIX, LENGTH))


@pytest.mark.parametrize("budget", [3, 12, 20])
def test_sinks_are_kept_as_far_as_the_budget_goes(seen, budget):
  """First the window, then the sinks, then the best of the others."""
  kept = select(seen, get_method("protokv.sat:sinks=5"), budget)
  last = min(WINDOW, budget)
  sinks = min(5, budget - last)
  for head in range(K):
    best = np.argsort(likeness_of(seen, head)[5:])[: budget - sinks - last] + 5
    assert kept[head] == [
      *range(sinks),
      *sorted(best.tolist()),
      *range(LENGTH - last, LENGTH),
    ]


def test_sat_of_equal_keys_keeps_the_first(seen):
  keys = jnp.broadcast_to(seen.keys[:, :, 3:4], seen.keys.shape)
  kept = select(
    dataclasses.replace(seen, keys=keys), get_method("protokv.sat"), 20
  )
  assert kept == [[*range(12), *range(PREFIX, LENGTH)]] * K


def test_assignment_ignores_the_scale_of_keys(seen):
  scaled = dataclasses.replace(seen, keys=seen.keys * 3)
  method = ProtoKV(prototypes=12, tokens_per_prototype=1, score="qk_sum")
  one, two = (ranking(x, method).cluster for x in (seen, scaled))
  np.testing.assert_array_equal(one, two)


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


@pytest.mark.parametrize("length", [5, 8])
def test_prompts_up_to_the_window_have_sinks(length):
  """Layers with sinks keep such a prompt's newest tokens, as others do."""
  seen = random_activations(31, [length], length)
  sinks = jnp.zeros(N, jnp.float32)
  seen = dataclasses.replace(seen, sinks=sinks)
  method = ProtoKV(score="attn_center")
  found = method.evaluate(jnp.int32(0), LayerCache.of(seen), seen)
  budget = LayerBudget(jnp.asarray([3], jnp.int32), length)
  slots = method.select(found, LayerCache.of(seen), budget)
  newest = [length - 3, length - 2, length - 1]
  assert [[int(i) for i in head if i >= 0] for head in slots[0]] == [newest] * K
