"""Analyses against brute force, a value by hand, or a law."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import kvjax
from kvjax.experiments.papers.analyses import (
  costs,
  deviations,
  head_statistics,
  latency,
  neighbors,
  observed,
  prompt_lengths,
  retained_keys,
  scorer_timing,
  stages,
  throughput,
)
from kvjax.experiments.papers.analyses.observed import unit
from kvjax.experiments.papers.findings import Subject
from kvjax.experiments.run import stopwatch
from kvjax.kernels.attention import AttentionOptions
from kvjax.testing import random_activations

RNG = np.random.default_rng(0)


def cosine(x, y):
  return x @ y / np.linalg.norm(x) / np.linalg.norm(y)


def test_what_is_observed_is_what_a_prefill_caches(subject):
  row = subject.rows[0]
  lm = subject.lm
  whole = kvjax.get_plan("full", kvjax.Retention(1.0))
  cache, _ = kvjax.prefill(lm.model, lm.params, kvjax.Prompts.of([row]), whole)
  seen = observed.activations(lm, row)
  for layer, own in zip(cache.layers, seen, strict=True):
    np.testing.assert_allclose(
      layer.keys[:, :, : len(row)], own.keys, atol=1e-5
    )
    assert own.queries.shape[2] == len(row) < layer.keys.shape[2]
  count = observed._activations._cache_size()
  observed.activations(lm, row[:-1])
  assert observed._activations._cache_size() == count


def test_log_determinants_are_those_of_all_cosines():
  for count in (3, 8, 12):
    keys = RNG.normal(size=(count, 8)) * RNG.uniform(1, 9, (count, 1))
    units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    whole = units @ units.T + 1e-6 * np.eye(count)
    expected = np.log(np.linalg.det(whole.astype(np.longdouble).astype(float)))
    found = retained_keys.log_determinant(keys)
    assert found == pytest.approx(expected, rel=1e-6)


def test_spread_is_measured_along_the_two_longest_axes():
  corners = np.array(
    [[x, y, z] for x in (9, -9) for y in (4, -4) for z in (1, -1)]
  )
  keys = np.tile(corners, (2, 1)).astype(float)
  assert retained_keys.spread(keys, keys) == pytest.approx(1.0)
  # 81 of 81 + 16 where only the first axis is left.
  along = np.array([[9.0, 0, 55], [-9.0, 0, -55]])
  assert retained_keys.spread(keys, along) == pytest.approx(81 / 97)


def test_methods_retain_as_many_keys_as_they_may(subject, monkeypatch):
  monkeypatch.setitem(retained_keys._SIZES, "small", (12, 8))
  monkeypatch.setattr(retained_keys, "METHODS", {"KeyDiff": "keydiff"})
  table = retained_keys.determinants(subject).tables[0]
  assert [line[0] for line in table.lines] == ["KeyDiff"]
  sizes = retained_keys._SIZES
  found = retained_keys._retained(subject, subject.rows[0], sizes)
  assert {len(keys) for own in found.values() for keys in own.values()} == {12}
  assert len(found["KeyDiff"]) == 4  # 2 layers, 2 KV heads


@pytest.mark.parametrize("scale", [None, 2.0])
def test_statistics_of_heads_are_those_of_the_whole_attention_matrix(scale):
  seen = random_activations(1, [12], 12, heads=2, kv_heads=1, head_dim=4)
  options = AttentionOptions(scale=scale)
  seen = dataclasses.replace(seen, attention=options)
  found = head_statistics.statistics(seen)
  keys = np.asarray(seen.keys[0, 0], np.float64)
  for head in range(2):
    queries = np.asarray(seen.queries[0, head], np.float64)
    logits = queries @ keys.T * (scale or 0.5)
    logits[np.triu_indices(12, 1)] = -np.inf
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    received = [weights[i:, i].mean() for i in range(12)]
    alike = [cosine(key, keys.mean(axis=0)) for key in keys]
    expected = np.corrcoef(alike, received)[0, 1]
    assert found.correlation[0, head] == pytest.approx(expected, abs=1e-4)
    pairs = [np.mean([cosine(key, other) for other in keys]) for key in keys]
    ranked = scipy.stats.spearmanr(-np.array(pairs), received).statistic
    assert found.rank_correlation[0, head] == pytest.approx(ranked, abs=1e-5)
    apart = cosine(keys.mean(axis=0), queries.mean(axis=0))
    assert found.apart[0, head] == pytest.approx(apart, abs=1e-5)
    top = cosine(keys[np.argmin(pairs)], queries.mean(axis=0))
    assert found.top[0, head] == pytest.approx(top, abs=1e-5)
    same = np.mean([cosine(query, queries.mean(axis=0)) for query in queries])
    assert found.queries_alike[0, head] == pytest.approx(same, abs=1e-5)
    norms = np.linalg.norm(queries, axis=1)
    assert found.query_norm[0, head] == pytest.approx(norms.mean(), abs=1e-5)
  assert found.keys_alike[0, 0] == pytest.approx(np.mean(alike), abs=1e-5)
  norms = np.linalg.norm(keys, axis=1)
  assert found.key_norm[0, 0] == pytest.approx(norms.mean(), abs=1e-5)
  variation = norms.std() / norms.mean()
  assert found.variation[0, 0] == pytest.approx(variation, abs=1e-5)


def test_likeness_is_the_mean_over_all_pairs():
  units = RNG.normal(size=(9, 3))
  units /= np.linalg.norm(units, axis=1, keepdims=True)
  chosen = np.arange(9) % 3 == 0
  inside, outside = units[chosen], units[~chosen]
  among = [x @ y for x, y in itertools.combinations(inside, 2)]
  between = [x @ y for x in inside for y in outside]
  expected = np.mean(among), np.mean(between)
  np.testing.assert_allclose(deviations.likeness(units, chosen), expected)
  assert np.isnan(deviations.likeness(units, np.arange(9) == 0)).all()


def test_tenths_are_by_deviation_and_share_all_of_the_mass():
  order = RNG.permutation(20).astype(float)
  mass = np.where(order >= 18, 3.0, 0.0) + np.where(order < 2, 1.0, 0.0)
  shares = deviations.by_decile(order, mass)
  np.testing.assert_allclose(shares, [0.25, *[0.0] * 8, 0.75])


def test_cosines_by_distance_are_means_over_pairs():
  queries = RNG.normal(size=(2, 7, 5))
  found = neighbors.cosines_by_distance(queries)
  assert list(found) == [1, 2, 4]
  for distance, value in found.items():
    pairs = [
      cosine(head[i], head[i + distance])
      for head in queries
      for i in range(7 - distance)
    ]
    assert value == pytest.approx(np.mean(pairs))


def test_zero_vectors_have_no_direction():
  vectors = np.array([[0.0, 0.0], [3.0, 4.0]], np.float32)
  found = unit(vectors)
  assert found.dtype == np.float32
  np.testing.assert_allclose(found, [[0.0, 0.0], [0.6, 0.8]], rtol=1e-6)
  queries = np.zeros((1, 3, 2))
  assert neighbors.cosines_by_distance(queries) == {1: 0.0, 2: 0.0}


def test_the_nearest_centroid_is_the_most_similar_query_before():
  queries = RNG.normal(size=(2, 80, 5))
  best = [
    max(cosine(head[at], head[at - back]) for back in range(1, 6))
    for head in queries
    for at in range(16, 80)
  ]
  found = neighbors.cosine_of_nearest(queries)
  assert found == pytest.approx(np.mean(best))


def test_top_keys_are_those_of_the_highest_products():
  queries, keys = RNG.normal(size=(3, 4)), RNG.normal(size=(10, 4))
  chosen = neighbors.highest(queries @ keys.T, 3)
  for query, own in zip(queries, chosen, strict=True):
    products = keys @ query
    assert own.sum() == 3
    assert products[own].min() > products[~own].max()


def test_equal_queries_share_all_of_their_top_keys(subject):
  """A prompt that repeats one token has, but for RoPE, one query."""
  tables = neighbors.measure(subject).tables
  assert [line[0] for line in tables[0].lines] == [
    "1",
    "2",
    "4",
    "8",
    "16",
    "32",
  ]
  one = RNG.normal(size=(4, 1, 8)).astype(np.float32)
  seen = random_activations(0, [40], 40)
  same = jnp.asarray(np.broadcast_to(one, (4, 40, 8)).copy())[None]
  seen = seen.__class__(**{**vars(seen), "queries": same})
  cosines, shared = neighbors._pairs(seen)
  np.testing.assert_allclose(cosines, 1.0)
  np.testing.assert_allclose(shared, 1.0)


def test_lengths_are_compared_with_each_budget(tiny):
  rows = [[7] * 512, [7] * 1024]
  subject = Subject(tiny, {"a": rows[:1], "b": rows[1:]}, (), "small", 0)
  (table,) = prompt_lengths.measure(subject).tables
  # N = 2K is 256 here.
  assert [tuple(line) for line in table.lines] == [
    ("a", "1", "512", "0.50", "1.00", "1.00", "1.00"),
    ("b", "1", "1024", "0.25", "0.50", "0.75", "1.00"),
    ("all", "2", "768", "0.38", "0.75", "0.88", "1.00"),
  ]


def test_deviations_are_shown_for_every_layer(subject):
  betas, deciles = deviations.measure(subject).tables
  assert [line[0] for line in betas.lines] == [
    "0",
    "0.5",
    "1",
    "1.5",
    "2",
    "3",
    "4",
  ]
  for line in deciles.lines:
    assert sum(map(float, line[1:])) == pytest.approx(100, abs=0.6)
  assert len(deciles.lines) == 2


def test_heads_are_shown_for_every_layer(subject):
  findings = head_statistics.measure(subject)
  (table,) = findings.tables
  assert [line[0] for line in table.lines] == ["0", "1"]
  # Two layers, of two KV heads or four query heads.
  keys, queries, *_ = findings.pictures["alike.png"].axes
  assert keys.images[0].get_array().shape == (2, 2)
  assert queries.images[0].get_array().shape == (2, 4)


def test_operations_are_those_of_the_formula(subject, monkeypatch):
  for n, d in ((3, 2), (2176, 128)):
    paper = costs.operations(n, d, costs._PAPER)
    assert paper == 12 * n * d + 3 * d + 97 * n + 47
    other = costs.operations(n, d, costs._OLDER)
    assert other == 6 * n * d + d + 18 * n + 12
  monkeypatch.setattr(costs, "_BLOCK", 8)
  operations, memory = costs.measure(subject._replace(lengths=(56,))).tables
  ((budget, paper, other, compiled, per_number),) = operations.lines
  # 12 + 3 / 64 + 97 / 128 and a little.
  assert (budget, per_number) == ("56", "12.81")
  paper, other, compiled = (
    int(count.replace(",", "")) for count in (paper, other, compiled)
  )
  assert paper == costs.operations(64, 128, costs._PAPER)
  # XLA has no other weights for most of them.
  assert 0.3 < compiled / other < 3
  assert list(memory.lines) == [["56", "64", "64", "56", "2,048", "512"]]


@pytest.mark.slow
def test_throughput_fills_the_memory_of_the_full_cache(subject, monkeypatch):
  """Nothing is timed here."""
  monkeypatch.setattr(throughput, "_seconds", lambda lm, cache, logits: 0.5)
  monkeypatch.setattr(throughput, "_BATCHES", (1, 2))
  monkeypatch.setattr(throughput, "_FULL_ROWS", 3)
  small = subject._replace(lengths=(256,))
  by_batch, at_equal_memory = throughput.measure(small).tables
  names = ["full", *throughput._METHODS]
  assert [list(line[:2]) for line in by_batch.lines] == [
    [batch, name] for batch in "12" for name in names
  ]
  found = {line[0]: line[1:] for line in at_equal_memory.lines}
  assert list(found) == names
  batch, device, host, rate, ratio = found["full"]
  assert (batch, host, rate, ratio) == ("3", "0.00", "96", "1.00")
  budget = 3 * float(device)
  for batch, device, _, rate, _ in found.values():
    assert int(rate) == int(batch) * throughput._STEPS / 0.5
    assert int(batch) * float(device) < budget + 0.1 * int(batch)
  batch, device, host, *_ = found["ctkvr:offload=true"]
  assert int(batch) > int(found["ctkvr"][0])
  assert float(host) > 0


def test_a_batch_has_at_least_a_row():
  assert [throughput.largest_batch(n, 10) for n in (11, 10, 5, 3)] == [
    1,
    1,
    2,
    3,
  ]


def test_a_median_leaves_out_the_call_that_compiles(monkeypatch):
  clock = itertools.chain.from_iterable([(0, 20), (0, 1), (0, 9), (0, 2)])
  monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
  calls = []
  assert scorer_timing.median_seconds(lambda: calls.append(1), rounds=3) == 2
  assert len(calls) == 4


def test_timings_name_all_that_they_time(subject, monkeypatch):
  """What takes how long is the device's business; here all is only traced."""
  timed = []

  def once(run):
    timed.append(jax.eval_shape(run))
    return 0.5

  monkeypatch.setattr(scorer_timing, "median_seconds", once)
  monkeypatch.setattr(stages, "_PROTOTYPES", (20,))
  monkeypatch.setattr(latency, "_HEADS", 2)
  monkeypatch.setattr(latency, "_KV_HEADS", 1)
  small = subject._replace(lengths=(48,))
  (scorers,) = latency.scorers(small).tables
  assert len(scorers.lines) == 5
  assert {line[2:] for line in map(tuple, scorers.lines)} == {("500.0", "1.00")}
  (found,) = stages.measure(small).tables
  assert [line[0] for line in found.lines][-2:] == ["ProtoKV", "SnapKV"]
  assert len(timed) == 5 + len(found.lines)
