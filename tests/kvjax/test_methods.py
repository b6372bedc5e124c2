"""Each method's score against its formula in float64 loops."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.methods import (
  KeyDiff,
  KeyL2Norm,
  LayerBudget,
  Random,
  SnapKV,
  StreamingLLM,
  Tova,
)
from kvjax.registry.names import get_method
from kvjax.testing import random_activations

N, K = 4, 2  # query heads, KV heads
LENGTH, PADDED = 37, 48


@pytest.fixture(scope="module")
def seen():
  return random_activations(7, [LENGTH], PADDED)


def scored(method, seen):
  """Scores of the real tokens of row 0, [K, n]."""
  scores = method.scores(jnp.int32(0), LayerCache.of(seen), seen)
  return np.asarray(scores, np.float64)[0, :, :LENGTH]


def wide(x, head):
  return np.asarray(x, np.float64)[0, head, :LENGTH]


def causal_weights(seen, query_head, window):
  """Softmax rows of the last `window` queries over all keys."""
  q, k = wide(seen.queries, query_head), wide(seen.keys, query_head * K // N)
  rows = []
  for i in range(max(LENGTH - window, 0), LENGTH):
    logits = q[i] @ k[: i + 1].T / np.sqrt(q.shape[1])
    row = np.zeros(LENGTH)
    row[: i + 1] = np.exp(logits) / np.exp(logits).sum()
    rows.append(row)
  return np.array(rows)


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclid"])
@pytest.mark.parametrize(
  "anchor", ["mean_unit", "median_unit", "median_raw", "mean_raw"]
)
def test_keydiff(seen, anchor, metric):
  ours = scored(KeyDiff(anchor=anchor, metric=metric), seen)
  for head in range(K):
    k = wide(seen.keys, head)
    unit = k / np.linalg.norm(k, axis=1, keepdims=True)
    center = {"mean": np.mean, "median": np.median}[anchor.split("_")[0]]
    mu = center(unit if "unit" in anchor else k, axis=0)
    expected = {
      "cosine": -(k @ mu) / np.linalg.norm(k, axis=1) / np.linalg.norm(mu),
      "dot": -(k @ mu),
      "euclid": np.linalg.norm(k - mu, axis=1),
    }[metric]
    np.testing.assert_allclose(ours[head], expected, rtol=0, atol=2e-5)


def test_keydiff_pairwise_is_the_sum_of_all_cosines(seen):
  ours = scored(KeyDiff(anchor="pairwise"), seen)
  for head in range(K):
    k = wide(seen.keys, head)
    unit = k / np.linalg.norm(k, axis=1, keepdims=True)
    expected = -np.array([sum(u @ v for v in unit) for u in unit])
    np.testing.assert_allclose(ours[head], expected, rtol=0, atol=2e-5)


def test_keydiff_pairwise_ranks_as_the_mean_does(seen):
  mean, pairwise = (
    scored(KeyDiff(anchor=a), seen) for a in ("mean_unit", "pairwise")
  )
  np.testing.assert_array_equal(np.argsort(mean), np.argsort(pairwise))


def test_keydiff_keeps_a_key_that_points_the_other_way(seen):
  aligned = np.abs(np.asarray(seen.keys)) + 1
  aligned[0, :, 11] *= -1
  odd = dataclasses.replace(seen, keys=jnp.asarray(aligned))
  assert np.all(scored(KeyDiff(), odd).argmax(axis=1) == 11)


def test_keydiff_ignores_the_scale_of_keys(seen):
  scaled = dataclasses.replace(seen, keys=seen.keys * 7.5)
  plain, larger = (np.argsort(scored(KeyDiff(), x)) for x in (seen, scaled))
  np.testing.assert_array_equal(plain, larger)


def test_keydiff_protects_a_share_of_the_budget(seen):
  cache = LayerCache.of(seen)
  guarded = KeyDiff(recent_frac=0.1).protected(cache, jnp.asarray([[29]]))
  assert np.flatnonzero(guarded[0, 0]).tolist() == [35, 36]


def test_key_norm(seen):
  ours = scored(KeyL2Norm(), seen)
  for head in range(K):
    expected = -np.linalg.norm(wide(seen.keys, head), axis=1)
    np.testing.assert_allclose(ours[head], expected, rtol=1e-6)


@pytest.mark.parametrize("scope", ["layer", "group"])
def test_tova(seen, scope):
  ours = scored(Tova(scope=scope), seen)
  last = [causal_weights(seen, j, 1)[0] for j in range(N)]
  for head in range(K):
    group = [last[j] for j in range(N) if j * K // N == head]
    expected = np.mean(last if scope == "layer" else group, axis=0)
    np.testing.assert_allclose(ours[head], expected, rtol=0, atol=1e-6)


def pooled(votes, kernel, pooling):
  half = kernel // 2
  padded = np.pad(votes, half)
  windows = [padded[i : i + kernel] for i in range(len(votes))]
  if pooling == "avg":
    return np.array([w.sum() / kernel for w in windows])
  return np.array([w.max() for w in windows])


@pytest.mark.parametrize(
  "method",
  [
    SnapKV(window=8, kernel=1),
    SnapKV(window=8, kernel=5),
    SnapKV(window=8, kernel=7, pooling="max", group="max"),
    SnapKV(window=1, kernel=3),
    SnapKV(window=8, kernel=1, paper_postproc=True),
  ],
  ids=str,
)
def test_snapkv(seen, method):
  ours = scored(method, seen)
  prefix = LENGTH - method.window
  for head in range(K):
    votes = np.array(
      [
        causal_weights(seen, j, method.window).sum(axis=0)[:prefix]
        for j in range(N)
        if j * K // N == head
      ]
    )
    votes = votes.mean(axis=0) if method.group == "mean" else votes.max(axis=0)
    if method.paper_postproc:
      norms = np.linalg.norm(wide(seen.values, head), axis=1)[:prefix]
      votes = pooled(votes * norms, 3, "avg")
    expected = pooled(votes, method.kernel, method.pooling)
    np.testing.assert_allclose(ours[head, :prefix], expected, rtol=0, atol=2e-6)


def test_snapkv_window_longer_than_the_row_protects_the_row(seen):
  cache = LayerCache.of(seen)
  guarded = SnapKV(window=64).protected(cache, jnp.asarray([[10]]))
  assert np.flatnonzero(guarded[0, 0]).tolist() == list(range(LENGTH))
  assert np.all(np.isfinite(scored(SnapKV(window=64), seen)))


def test_snapkv_may_delete_the_most_attended_but_sinks(seen):
  cache = LayerCache.of(seen)
  most, least = (
    SnapKV(window=8, kernel=1, keep=keep, sinks=3) for keep in ("most", "least")
  )
  budget = LayerBudget(jnp.asarray([21], jnp.int32), 21)
  votes = scored(most, seen)[:, 3 : LENGTH - 8]
  ends = {0, 1, 2, *range(LENGTH - 8, LENGTH)}
  for method, sign in ((most, -1), (least, 1)):
    scores = method.evaluate(jnp.int32(0), cache, seen)
    slots = np.asarray(method.select(scores, cache, budget))
    for head in range(K):
      best = np.argsort(sign * votes[head])[:10] + 3
      assert set(slots[0, head].tolist()) == ends | set(best.tolist())


def test_streaming_keeps_sinks_and_the_newest(seen):
  method = StreamingLLM()
  guarded = method.protected(LayerCache.of(seen), jnp.asarray([[10]]))
  assert np.flatnonzero(guarded[0, 0]).tolist() == [0, 1, 2, 3]
  assert np.all(np.diff(scored(method, seen)) > 0)


def test_random_is_uniform_and_independent_of_what_follows(seen):
  long = random_activations(0, [4000], 4000)
  scores = np.asarray(Random().scores(jnp.int32(1), LayerCache.of(long), long))
  assert abs(scores.mean() - 0.5) < 0.02
  assert abs(np.corrcoef(scores[0, 0], scores[0, 1])[0, 1]) < 0.05
  # The same tokens get the same scores, other tokens or layers get others.
  cut = dataclasses.replace(
    long,
    queries=long.queries[:, :, :LENGTH],
    keys=long.keys[:, :, :LENGTH],
    values=long.values[:, :, :LENGTH],
    keys_unrotated=None,
    positions=long.positions[:, :LENGTH],
  )
  short = np.asarray(Random().scores(jnp.int32(1), LayerCache.of(cut), cut))
  np.testing.assert_array_equal(short, scores[:, :, :LENGTH])
  for layer, prompt in ((0, cut), (1, seen)):
    cache = LayerCache.of(prompt)
    other = np.asarray(Random().scores(jnp.int32(layer), cache, prompt))
    assert not np.any(other[:, :, :LENGTH] == short)


@pytest.mark.parametrize(
  ("name", "said"),
  [
    ("snapvk", "did you mean snapkv"),
    ("keydif", "method 'keydif' (did you mean keydiff or "),
    ("keydif", "?); kvjax methods lists all, and a file of your own"),
    ("my.py", "A method has a name, and my.py is a file; give the file to"),
    ("./my.py:power=2", "a name, and ./my.py is a file; give the file to --pl"),
    ("ada/../../my.py", "or import it in Python, and give the name that it"),
    ("snapkv.kvpres", "did you mean snapkv.kvpress"),
    ("zzz", "There is no method 'zzz'; kvjax methods lists all"),
    ("keydiff:ancor=pairwise", "did you mean anchor"),
    ("full:window=3", "it has none"),
    ("snapkv:window", "needs a value"),
    ("snapkv:window=2.5", "takes a value such as 32"),
    ("snapkv:window=3000000000", "takes a value such as 32"),
    ("snapkv:window=8:window=9", "'window' of 'snapkv' is given twice"),
    ("compactor:blend=1e400", "takes a value such as 0.3"),
    ("compactor:blend=nan", "takes a value such as 0.3"),
    ("key_norm:skip_layers=0.5", "takes a value such as '0+1'"),
    ("key_norm:skip_layers=-1", "skip_layers are numbers of layers, 0 for the"),
    ("lagkv:skip_layers=0+-1", "skip_layers are numbers of layers, 0 for the"),
    ("pyramidkv:inner=3", "has no option 'inner'"),
    ("snapkv:window=0", "window must be 1 or more"),
    ("snapkv:kernel=4", "kernel must be odd"),
    ("keydiff:anchor=mode", "anchor must be one of"),
    ("keydiff:recent_frac=1.5", "between 0 and 1"),
    ("keydiff:anchor=pairwise:metric=dot", "metric=cosine only"),
    ("tova:protect_last=3", "takes a value such as False"),
    ("streaming:sinks=-1", "0 or more"),
    ("lagkv:cross_scoring=true", "cross_scoring=True changes nothing with mo"),
    ("lagkv.kvpress:retention_of=row", "nothing with mode=kvpress; leave it"),
    ("lagkv.key_norm:ddof=0", "ddof=0 changes nothing with score=key_norm"),
    (
      "protokv:clusters=kmeans:anchors=4",
      "nothing with clusters=kmeans; leave",
    ),
    ("protokv.kmeans:hash=hyperplane", "leave it out, or change clusters."),
    ("protokv.sat:score=qk_sum", "score=qk_sum changes nothing with clusters="),
    ("triattention:farthest=100000", "100000 is between 65536 and 131072."),
  ],
)
def test_a_wrong_name_is_explained(name, said):
  with pytest.raises(InputError, match=re.escape(said)):
    get_method(name)


@pytest.mark.parametrize(
  ("name", "other"),
  [
    (
      "lagkv:cross_scoring=true:mode=kvpress",
      "mode=kvpress:cross_scoring=true",
    ),
    (
      "lagkv.kvpress:retention_of=row:mode=paper",
      "sinks=4:lag=128:retention_of=row",
    ),
    ("protokv:bits=9:clusters=lsh", "clusters=lsh:bits=9"),
  ],
)
def test_options_are_judged_together(name, other):
  base = name.partition(":")[0].partition(".")[0]
  assert get_method(name) == get_method(f"{base}:{other}")


def test_names_carry_options():
  assert get_method("keydiff:anchor=median_raw:recent_frac=0.1") == KeyDiff(
    anchor="median_raw", recent_frac=0.1
  )
  assert get_method("key_norm:skip_layers=0+1") == KeyL2Norm((0, 1))
  assert get_method("snapkv.kvpress:window=16") == SnapKV(16, 5)
  assert get_method("tova:protect_last=true") == Tova(protect_last=True)
