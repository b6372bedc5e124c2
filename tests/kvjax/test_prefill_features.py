"""What a prefill tells about prompts: tail likelihood and concentration."""

import dataclasses

import jax
import numpy as np
import pytest
import scipy.stats

import kvjax
from kvjax.calibration.features import OF_SCORES, TAIL
from kvjax.engine import compress, prompt_programs, sweeping
from kvjax.testing import TinyModel

MODEL = TinyModel()
PARAMS = MODEL.init()
RNG = np.random.default_rng(1)
ROWS = [RNG.integers(0, 64, n).tolist() for n in (150, 97, 40)]
PROMPTS = kvjax.Prompts.of(ROWS)
NAMES = [
  "key_norm",
  "snapkv:window=4",
  "pyramid/ada/keydiff",
  "chunkkv:window=5:chunk=4",
  "lagkv:sinks=2:lag=6",
  "compactor",
  "protokv:window=5:prototypes=20",
]


HALF = kvjax.Retention(0.5)


def plan_of(name, budget=HALF):
  return kvjax.get_plan(name, budget)


@pytest.fixture(scope="module")
def measured():
  plans = [plan_of("key_norm"), plan_of("full")]
  return kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, plans)


def test_the_tail_is_what_a_shorter_prompt_lacks(measured):
  """Sums of -ln p: that of a prompt less that of its beginning."""
  beginnings = kvjax.Prompts.of([row[:-TAIL] for row in ROWS[:2]])
  before = kvjax.negative_log_likelihood(MODEL, PARAMS, beginnings)
  nll, length, tail_nll, *_ = measured.features[0]
  assert length.tolist() == [150, 97, 40]
  whole = np.float64(nll[:2]) * (length[:2] - 1)
  rest = np.float64(before) * (length[:2] - TAIL - 1)
  np.testing.assert_allclose(tail_nll[:2], (whole - rest) / TAIL, rtol=1e-4)
  assert abs(tail_nll[0] - nll[0]) > 1e-3
  # All of a short prompt is its tail.
  np.testing.assert_allclose(tail_nll[2], nll[2], rtol=1e-6)
  np.testing.assert_array_equal(nll, measured.nll)


def test_shapes_are_those_of_the_scores(measured):
  """Written out for key norms, which the full cache holds."""
  cache = measured.caches[-1]
  expected = []
  for row, tokens in enumerate(ROWS):
    heads = []
    for layer in cache.layers:
      norms = np.linalg.norm(
        np.float64(layer.keys[row, :, : len(tokens)]), axis=-1
      )
      w = norms.max(axis=-1, keepdims=True) - norms
      shares = w / w.sum(axis=-1, keepdims=True)
      heads.append(
        (
          np.log(len(tokens) * np.sum(shares**2, axis=-1)),
          scipy.stats.skew(-norms, axis=-1),
          scipy.stats.kurtosis(-norms, axis=-1, fisher=False),
        )
      )
    expected.append(np.mean(heads, axis=(0, 2)))
  found = [getattr(measured.features[0], name) for name in OF_SCORES]
  np.testing.assert_allclose(np.transpose(found), expected, rtol=1e-3)


@pytest.mark.slow
def test_a_row_stands_alone():
  plans = [*map(plan_of, NAMES), plan_of("full")]
  measured = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, plans)
  alone = kvjax.measured_sweep(
    MODEL, PARAMS, kvjax.Prompts.of(ROWS[1:2]), plans
  )
  for name, ours, theirs in zip(
    [*NAMES, "full"], measured.features, alone.features, strict=True
  ):
    if name == "full":
      assert ours.concentration is None
      continue
    assert np.all(ours.concentration > 0), name
    for feature in OF_SCORES:
      one, other = getattr(ours, feature), getattr(theirs, feature)
      np.testing.assert_allclose(one[1:2], other, rtol=1e-3, err_msg=name)
    assert ours.tail_nll[1] == pytest.approx(theirs.tail_nll[0], rel=1e-5)


@pytest.mark.slow
def test_a_method_that_ranks_by_position_has_no_scores_to_shape():
  plan = plan_of("protokv:window=5:prototypes=20:cut=position")
  swept = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, [plan])
  for name in OF_SCORES:
    assert np.all(np.isnan(getattr(swept.features[0], name)))


def test_every_budget_of_a_method_has_the_same_features():
  """Also where nothing is evicted, so that calibrations see what they learn."""
  plans = [plan_of("keydiff", kvjax.Tokens(n)) for n in (5, 1000)]
  some = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, plans).features
  np.testing.assert_array_equal(some[0].concentration, some[1].concentration)
  whole = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, plans[1:]).features
  np.testing.assert_array_equal(some[1].concentration, whole[0].concentration)


def automatic(name, **fields):
  plan = plan_of(name, kvjax.Retention(1.0))
  record = kvjax.Calibration(
    0.0, -3.0, "tiny", plan.label, False, (0.1, 1.0), 0.0, 1, **fields
  )
  return dataclasses.replace(plan, budget=kvjax.Calibrated(record, 0.9))


@pytest.mark.parametrize(
  "name",
  [
    "snapkv:window=4",
    pytest.param("lagkv:sinks=2:lag=6", marks=pytest.mark.slow),
  ],
)
def test_a_rule_on_all_features_sets_the_retention_of_each_row(name):
  slopes = (
    *(("tail_nll", 0.4), ("concentration", -2.0), ("log_length", 0.1)),
    *(("skewness", 0.1), ("kurtosis", -0.01)),
  )
  measured = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, [plan_of(name)])
  plan = automatic(name, slopes=slopes)
  swept = kvjax.measured_sweep(MODEL, PARAMS, PROMPTS, [plan])
  expected = plan.budget.retentions(measured.features[0])
  assert len(set(expected)) == 3
  np.testing.assert_allclose(swept.retentions[0], expected, rtol=1e-4)
  # The same in a prefill, of which nothing is measured besides.
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  jax.tree.map(np.testing.assert_array_equal, cache, swept.caches[0])


def test_other_prompts_run_the_same_programs():
  plan = automatic("snapkv:window=4", slopes=(("concentration", -2.0),))
  programs = [
    compress.shape_of_scores,
    compress.evaluate_layer,
    prompt_programs.head,
  ]
  found = []
  for seed in range(2):
    rows = [np.random.default_rng(seed).permutation(64)[:60].tolist()]
    swept = kvjax.measured_sweep(MODEL, PARAMS, kvjax.Prompts.of(rows), [plan])
    found.append(
      (swept.retentions[0].item(), [f._cache_size() for f in programs])
    )
  assert found[0][0] != found[1][0]
  assert found[0][1] == found[1][1]


def test_scores_are_shaped_on_demand(monkeypatch):
  monkeypatch.setattr(sweeping, "shape_of_scores", None)
  plans = [automatic("keydiff", slopes=(("tail_nll", 0.1),)), plan_of("tova")]
  caches, _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, plans)
  assert len(caches) == 2
