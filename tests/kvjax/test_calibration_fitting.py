"""The fit of a curve, the choice of its rule, and what it promises."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import kvjax
from kvjax.calibration.conformal import TARGETS, add_promises, promises
from kvjax.calibration.features import Features
from kvjax.calibration.fitting import PAPER, Rule, asymmetric_loss, fit
from kvjax.calibration.measured import Triples
from kvjax.calibration.record import Calibration
from kvjax.calibration.rules import candidates, choose, cross_validate, r2
from kvjax.calibration.shape import mean_quality, shaped
from kvjax.errors import InputError
from kvjax.methods import KeyDiff, SnapKV

RETENTIONS = [0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 0.9]
RECORD = Calibration(0.0, -3.0, "tiny", "KeyDiff", False, (0.2, 1.0), 0.0, 1)


def plain(retention, kc):
  """The paper's formula in float64, where that is well conditioned."""
  return np.expm1(retention * kc) / np.expm1(kc)


def test_promises_by_hand():
  ratios = [[0.4, 0.8, 0.6], [0.9, 0.3, 1.0], [1.2, 0.7, 1.0]]
  cut = [[True] * 3, [True, True, False], [True, True, False]]
  # The second keeps 0.3 somewhere; nothing of the third is cut after 0.6.
  least = [0.4 + 0.3 + 0.6, 0.9 + 0.3 + 0.6, 1.0 + 0.7 + 0.6]
  asked = (0.5, 0.9, 0.99)
  found = promises(asked, np.array(ratios), np.array(cut))
  assert [q for q, _ in found] == [*asked]
  np.testing.assert_allclose([kept for _, kept in found], np.divide(least, 4))


@pytest.mark.parametrize("tau", [0.8, 0.9])
def test_contexts_keep_tau_on_average_however_wrong_the_curve_is(tau):
  """Each is as good as lost below one of 22 qualities, the last two above 1."""
  rng = np.random.default_rng(3)
  asked, others = np.linspace(0.5, 0.975, 20), 20
  expected = []
  for _ in range(600):
    needs = rng.integers(0, 22, others)
    ratios = (np.arange(20)[:, None] >= needs).astype(float)
    found = promises(asked.tolist(), ratios, np.ones((20, others), bool))
    level = dataclasses.replace(RECORD, promises=found).curve_target(tau)
    # How many of the 22 a new context may draw.
    good = 22 if level == 1 else np.sum(asked <= level + 1e-9)
    expected.append(good / 22)
  assert tau < np.mean(expected) < tau + 0.06


def triples(alpha, beta, noise=0.0, contexts=80):
  rng = np.random.default_rng(1)
  nll = np.repeat(rng.uniform(0.3, 4, contexts), len(RETENTIONS))
  r = np.tile(RETENTIONS, contexts)
  y = plain(r, alpha * nll + beta) + noise * rng.normal(size=r.shape)
  return Triples(r, nll, np.clip(y, 0, 1.5))


@pytest.mark.parametrize(
  ("alpha", "beta"), [(2, -9), (0.5, -20), (3, -2), (-1, 4), (0, 3), (8, -12)]
)
def test_a_fit_recovers_what_made_the_triples(alpha, beta):
  found = fit(triples(alpha, beta))
  np.testing.assert_allclose(found[:3], (alpha, beta, 0), atol=1e-6)
  assert found[3:] == ((), ())


def test_a_fit_sees_through_noise():
  found = fit(triples(2, -9, noise=0.03, contexts=400))
  nll = np.linspace(0.3, 4, 20)
  r = np.array(RETENTIONS)[:, None]
  curves = [plain(r, a * nll + b) for a, b in (found[:2], (2, -9))]
  assert np.abs(np.subtract(*curves)).max() < 0.03
  np.testing.assert_allclose(found.error, 0.03, rtol=0.2)


def test_a_fit_is_no_worse_than_any_line_tried():
  data = triples(2, -9, noise=0.15)
  found = fit(data)
  r, nll, y = data[:3]

  def loss(alpha, beta):
    error = plain(r, alpha * nll + beta) - y
    return np.mean(np.where(error > 0, 4, 1) * error**2)

  near = np.linspace(-0.5, 0.5, 41)
  least = min(
    loss(found.alpha + a, found.beta + b) for a in near for b in 3 * near
  )
  best = loss(found.alpha, found.beta)
  assert best <= least
  predicted = found.predict(data)
  np.testing.assert_allclose(
    predicted, plain(r, found.alpha * nll + found.beta)
  )
  with jax.enable_x64(True):
    weight = jnp.full(len(y), 0.3)
    loss_of_fit = asymmetric_loss(
      jnp.asarray(predicted), jnp.asarray(y), 4.0, weight
    )
  np.testing.assert_allclose(loss_of_fit, best)


def test_promising_too_much_weighs_four_times():
  """Alike contexts: the curve passes through the expectile of 1/5."""
  y = np.array([0.2, 0.3, 0.5, 0.6, 0.9])
  found = fit(Triples(np.full(5, 0.4), np.full(5, 2.0), y))
  grid = np.linspace(0, 1, 100_001)[:, None]
  error = grid - y
  losses = np.mean(np.where(error > 0, 4, 1) * error**2, axis=1)
  through = plain(0.4, found.alpha * 2 + found.beta)
  np.testing.assert_allclose(through, grid[losses.argmin(), 0], atol=2e-5)


@pytest.mark.parametrize(
  ("data", "said"),
  [
    (([], [], []), "at least one triple"),
    (([0.5, 1.0], [1.0, 1.0], [1.0, 1.0]), "below 1; 1 is not"),
    (([0.5], [np.nan], [1.0]), "finite"),
  ],
)
def test_what_cannot_be_fitted_is_refused(data, said):
  with pytest.raises(InputError, match=said):
    fit(Triples(*map(np.array, data)))


FEATURES = ("nll", "tail_nll", "concentration", "log_length")


def wide_triples(power=1.0, noise=0.0, contexts=60):
  """Triples of two tasks whose curves depend on all features."""
  rng = np.random.default_rng(2)
  context = np.repeat(np.arange(contexts), len(RETENTIONS))
  features = Features(
    rng.uniform(0.3, 4, contexts)[context],
    rng.integers(100, 2000, contexts)[context],
    rng.uniform(0.3, 4, contexts)[context],
    rng.uniform(0, 2, contexts)[context],
  )
  r = np.tile(RETENTIONS, contexts)
  kc = -6 + features.column("nll") - features.column("tail_nll") / 2
  kc += 2 * features.column("concentration") + features.column("log_length") / 4
  y = plain(r**power, kc) + noise * rng.normal(size=r.shape)
  return Triples(
    r,
    features.nll,
    np.clip(y, 0, 1.5),
    features.length,
    features.tail_nll,
    features.concentration,
    context,
    [("one", "two")[c % 2] for c in context],
  )


def test_a_fit_of_all_features_recovers_what_made_the_triples():
  data = wide_triples()
  found = fit(data, Rule(FEATURES, shaped=False, too_high=1.0))
  assert [name for name, _ in found.slopes] == [*FEATURES[1:]]
  slopes = [slope for _, slope in found.slopes]
  np.testing.assert_allclose(slopes, (-0.5, 2, 0.25), atol=1e-5)
  np.testing.assert_allclose((found.alpha, found.beta), (1, -6), atol=1e-5)
  np.testing.assert_allclose(found.predict(data), data.ratio, atol=1e-6)


def test_a_shaped_fit_is_one_of_the_means():
  """The same as an unshaped one, of triples whose retentions are the means."""
  data = wide_triples(power=3.0, noise=0.05)
  found = fit(data, Rule(FEATURES, shaped=True, too_high=1.0))
  means = [np.mean(data.ratio[data.retention == share]) for share in RETENTIONS]
  assert np.all(np.diff(means) > 0)
  expected = (60 * np.array(means) + RETENTIONS) / 61
  grid, values = zip(*found.shape, strict=True)
  assert grid == (*RETENTIONS,)
  np.testing.assert_allclose(values, expected)
  moved = data._replace(retention=np.tile(expected, 60))
  plain_fit = fit(moved, Rule(FEATURES, shaped=False, too_high=1.0))
  np.testing.assert_allclose(found.alpha, plain_fit.alpha, rtol=1e-6)
  np.testing.assert_allclose(
    found.predict(data), plain_fit.predict(moved), atol=1e-8
  )


def test_means_never_fall_and_are_the_nearest_such():
  rng = np.random.default_rng(4)
  for _ in range(20):
    contexts = 3
    ratio = rng.random((contexts, len(RETENTIONS)))
    weight = rng.integers(0, 3, ratio.shape).astype(float)
    weight[0] = 1
    data = Triples(
      np.tile(RETENTIONS, contexts), np.ones(ratio.size), ratio.ravel()
    )
    found = mean_quality(data, weight.ravel())
    count = weight.sum(axis=0)
    means = (weight * ratio).sum(axis=0) / count
    nearest = scipy.optimize.isotonic_regression(means, weights=count).x
    grid, values = zip(*found, strict=True)
    assert grid == (*RETENTIONS,)
    # One more triple is as good as its retention.
    number = count.mean()
    expected = (number * nearest + RETENTIONS) / (number + 1)
    np.testing.assert_allclose(values, expected, atol=1e-12)
    assert np.all(np.diff(values) > 0)


def test_means_are_interpolated_from_nothing_to_all():
  shape = ((0.2, 0.6), (0.5, 0.9))
  found = shaped(np.array([0, 0.1, 0.2, 0.35, 0.5, 0.75, 1]), shape)
  np.testing.assert_allclose(found, [0, 0.3, 0.6, 0.75, 0.9, 0.95, 1])
  some = np.array([0.1, 0.7])
  assert shaped(some, ()).tolist() == some.tolist()


def test_a_ridge_is_the_weight_of_squared_numbers():
  data = triples(2, -9, noise=0.02)
  nll = (data.nll - data.nll.mean()) / data.nll.std()

  def objective(weights):
    found = plain(data.retention, weights[0] + weights[1] * nll)
    return np.mean((found - data.ratio) ** 2) + 1e-2 * np.sum(weights**2)

  best = scipy.optimize.minimize(objective, (-3.0, 0.5), tol=1e-12).x
  found = fit(data, Rule(("nll",), False, 1.0, ridge=1e-2))
  assert found.alpha * data.nll.std() == pytest.approx(best[1], abs=1e-4)
  center = found.beta + found.alpha * data.nll.mean()
  assert center == pytest.approx(best[0], abs=1e-4)
  assert best[1] < 0.9 * fit(data, Rule(("nll",), False, 1.0)).alpha * (
    data.nll.std()
  )


def test_few_contexts_do_not_determine_steep_slopes():
  """Curves of three contexts meet any step, and of more lengths than one."""
  data = Triples(
    np.tile([0.1, 0.2], 3),
    np.repeat([1.0, 1.1, 1.2], 2),
    np.array([0.0, 1, 1, 1, 1, 1]),
    np.repeat([370, 371, 374], 2),
    context=np.repeat([0, 1, 2], 2),
  )
  found = fit(data, choose(data))
  assert abs(found.alpha * np.std(data.nll)) < 50
  for _, slope in found.slopes:
    assert abs(slope * np.std(np.log(data.length))) < 50


def test_triples_of_weight_zero_do_not_count():
  data = triples(2, -9)
  weight = np.arange(len(data.ratio)) < 280
  spoiled = data._replace(ratio=np.where(weight, data.ratio, 0.3))
  found = fit(spoiled, PAPER, weight.astype(float))
  np.testing.assert_allclose(found[:2], (2, -9), atol=1e-6)


@pytest.mark.slow
def test_a_context_is_predicted_by_others():
  data = wide_triples(noise=0.05, contexts=12)
  rule = Rule(("nll", "tail_nll"), shaped=True, too_high=1.0)
  found = cross_validate(data, rule)
  fifth = data.context % 5 == 2
  rest = data.select(~fifth)
  expected = fit(rest, rule).predict(data)[fifth]
  np.testing.assert_allclose(found[fifth], expected, atol=1e-5)
  with pytest.raises(InputError, match="at least two contexts"):
    cross_validate(data._replace(context=np.zeros_like(data.context)), rule)


def test_the_rule_is_chosen_that_predicts_other_contexts_best():
  chosen = choose(wide_triples(noise=0.01))
  assert chosen[:3] == (FEATURES, True, 1.0)
  # Only the likelihood is known, and the paper's curve made the triples.
  chosen = choose(triples(2, -9, noise=0.02))
  assert chosen.features == ("nll",)
  assert chosen.too_high == 1
  one = wide_triples().select(np.arange(len(RETENTIONS)))
  assert choose(one) == (("nll",), True, 1.0, 1e-2)


def test_rules_have_features_that_were_measured():
  known = triples(2, -9)
  assert [rule.features for rule in candidates(known)] == [("nll",)] * 2
  measured = wide_triples()
  assert len({rule.features for rule in candidates(measured)}) == 2**3
  shapes = measured._replace(skewness=measured.nll, kurtosis=measured.nll)
  rules = [rule.features for rule in candidates(shapes)]
  assert len(set(rules)) == 2**4
  assert [len(rule) for rule in rules[:4]] == [1, 1, 2, 2]
  for rule in rules:
    assert ("skewness" in rule) == ("kurtosis" in rule)


def lossy(contexts, seed=0):
  """Triples of a method that loses contexts at random, whatever they are.

  As with LagKV's on short contexts: most survive even the least retention, and
  a few are lost up to the highest but one.
  """
  rng = np.random.default_rng(seed)
  lost = np.array([0.07, 0.07, 0.07, 0.07, 0.06, 0.03, 0.0])
  ratio = (rng.random(contexts)[:, None] >= lost).astype(float)
  index = np.repeat(np.arange(contexts), len(RETENTIONS))
  return Triples(
    np.tile(RETENTIONS, contexts),
    rng.uniform(0.3, 4, contexts)[index],
    ratio.ravel(),
    rng.integers(400, 500, contexts)[index],
    rng.uniform(0.3, 4, contexts)[index],
    rng.uniform(0, 2, contexts)[index],
    index,
  )


@pytest.mark.parametrize("seed", [10, 20])
def test_where_nothing_predicts_a_context_all_keep_nearly_the_same(seed):
  """What the promise needs, which is less than everything.

  Also if none of the fitted contexts lost anything, as with the first seed.
  """
  data, others = lossy(60, seed), lossy(200, seed + 1)
  assert bool(np.all(data.ratio == 1)) == (seed == 10)
  record = calibrated(data, others)
  assert dict(record.r2)["all"] < 0
  tested = lossy(4000, seed + 2)
  shares = kvjax.Calibrated(record, 0.95).retentions(tested.features)
  kept = np.unique(shares)
  places = np.searchsorted(RETENTIONS, kept)
  # Neighbors among the measured ones, and never the whole context.
  assert np.all(np.diff(places) == 1)
  assert np.all(places < len(RETENTIONS))
  assert 0.95 <= quality_at(tested, shares) < 0.995


def test_a_rule_needs_its_features():
  with pytest.raises(InputError, match="depends on tail_nll, log_length"):
    fit(triples(2, -9), Rule(("nll", "tail_nll", "log_length"), False, 1.0))


def test_r2_by_hand():
  y = np.array([0.0, 0.5, 1.0])
  assert r2(y, y) == 1
  assert r2(np.full(3, 0.5), y) == 0
  assert r2(np.array([1.0, 0.5, 0.0]), y) == -3
  assert r2(np.ones(2), np.ones(2)) == 1
  assert r2(np.zeros(2), np.ones(2)) == 0


def calibrated(measured, others, **options):
  return kvjax.calibrate(
    measured,
    model_id="tiny",
    method=KeyDiff(),
    preset="prefill",
    others=others,
    **options,
  )


def shuffled_contexts(data, seed, count):
  """Other contexts: each of `data` may be drawn several times."""
  rng = np.random.default_rng(seed)
  picks = rng.integers(0, data.context.max() + 1, count)
  index = np.concatenate([np.flatnonzero(data.context == c) for c in picks])
  drawn = data.select(index)
  return drawn._replace(
    context=np.repeat(np.arange(count), len(RETENTIONS)),
    task=[data.task[i] for i in index],
  )


@pytest.mark.slow
@pytest.mark.parametrize("power", [0.5, 2.0])
def test_a_calibration_keeps_tau_on_other_contexts(power):
  """With a curve that is too cautious, and one that promises too much."""
  noisy = wide_triples(noise=0.1, contexts=100)
  others = noisy._replace(ratio=np.clip(noisy.ratio, 0, 1) ** power)
  curve = calibrated(noisy, None)
  kept, targets = [], []
  for seed in range(6):
    drawn = shuffled_contexts(others, seed, 60)
    record = add_promises(curve, [(curve, drawn)])
    assert len(record.promises) > 20
    asked, means = np.transpose(record.promises)
    assert np.all(np.diff(asked) > 0)
    assert np.all(np.diff(means) > 0)
    assert set(asked) <= {*TARGETS}
    shares = kvjax.Calibrated(record, 0.8).retentions(others.features)
    kept.append(quality_at(others, shares))
    targets.append(record.curve_target(0.8))
  assert 0.79 < np.mean(kept) < 0.86
  # A curve that is too cautious is asked for less than is wanted.
  assert (np.mean(targets) < 0.8) == (power < 1)


def quality_at(data, shares):
  """Mean quality of contexts at a retention each; `shares` repeats them."""
  whole = shares[:: len(RETENTIONS)] == 1
  kept = np.minimum(data.ratio, 1)[data.retention == shares]
  assert len(kept) + whole.sum() == data.context.max() + 1
  return (kept.sum() + whole.sum()) / len(whole)


def test_a_calibration_tells_r2_by_task_and_where_it_comes_from():
  data = wide_triples(noise=0.05).capped
  others = shuffled_contexts(data, 1, 40)
  record = calibrated(data, others, data="two tasks", seed=5)
  predicted = fit(data, choose(data)).predict(others)
  task = np.array(others.task)
  expected = {"all": r2(predicted, others.ratio)} | {
    name: r2(predicted[task == name], others.ratio[task == name])
    for name in ("one", "two")
  }
  assert dict(record.r2) == pytest.approx(expected)
  assert (record.data, record.seed) == ("two tasks", 5)
  names = [name for name, *_ in record.ranges]
  assert names == [*Features._fields[:4]]
  assert record.ranges[1][1:] == (data.length.min(), data.length.max())


def test_promises_need_contexts_at_every_retention():
  data = wide_triples(noise=0.05, contexts=20)
  part = data.select(np.arange(len(data.ratio)) >= 3)
  with pytest.raises(InputError, match=r"each measured once at 0\.05, 0\.1"):
    calibrated(data, part)


def test_the_ratio_of_likelihoods():
  full, kept = (
    np.array([1e-5, 1.0, 2.0, 0.5]),
    np.array([1e-5, 1.7, 1.0, np.inf]),
  )
  np.testing.assert_allclose(
    kvjax.likelihood_ratio(full, kept), [1, np.exp(-0.7), 1, 0]
  )


def test_the_ratio_of_negative_log_likelihoods():
  full, kept = np.array([1.0, 0.0, 2.0, 0.5]), np.array([2.0, 0.0, 1.0, np.inf])
  np.testing.assert_allclose(
    kvjax.nll_ratio(full, kept), [1.001 / 2.001, 1, 1.5, 0]
  )


@pytest.mark.slow
def test_promises_without_other_contexts_are_cross_validated():
  """Each context is tested on the curve that was fitted to the others."""
  data = wide_triples(noise=0.1, contexts=15).capped
  record = calibrated(data, None)
  chosen = choose(data)
  ratios = []
  for context in range(15):
    rest = data.select(data.context % 5 != context % 5)
    own = data.select(data.context == context)
    found = fit(rest, chosen)
    curve = dataclasses.replace(
      record,
      alpha=found.alpha,
      beta=found.beta,
      slopes=found.slopes,
      shape=tuple(mean for _, mean in found.shape),
      promises=(),
    )
    first = Features(*(None if x is None else x[:1] for x in own.features))
    shares = [curve.retentions(first, target)[0] for target in TARGETS]
    quality_of = dict(zip(own.retention, own.ratio, strict=True)) | {1.0: 1.0}
    ratios.append([quality_of[share] for share in shares])
  ratios = np.transpose(ratios)
  expected = dict(promises(TARGETS, ratios, np.ones(ratios.shape, bool)))
  assert len(record.promises) > 5
  for target, kept in record.promises:
    assert kept == pytest.approx(expected[target], abs=1e-6)
  assert dict(record.r2)["all"] == pytest.approx(
    r2(cross_validate(data, chosen), data.ratio)
  )


def test_a_record_is_saved_and_loaded(tmp_path):
  data = triples(2, -9, noise=0.1)
  made = kvjax.calibrate(
    data, model_id="tiny", method=SnapKV(window=5), preset="paper"
  )
  found = fit(data)
  assert (made.alpha, made.beta, made.error) == found[:3]
  assert made.triples == 80 * 7
  assert made.tau_range == (data.ratio.min(), 1.0)
  assert made.grid == tuple(RETENTIONS)
  assert made.ranges == (("nll", data.nll.min(), data.nll.max()),)
  assert (made.promises, made.preset, made.slopes) == ((), "paper", ())
  made = dataclasses.replace(
    made,
    promises=((0.5, 0.25), (0.9, 0.75)),
    preset="prefill",
    slopes=(("tail_nll", 0.5), ("concentration", -1.0)),
    shape=tuple(np.linspace(0.2, 0.8, 7).tolist()),
    r2=(("all", 0.5), ("one", -0.25)),
    data="RULER",
    seed=3,
  )
  path = tmp_path / "snapkv.json"
  made.save(path)
  assert Calibration.load(path, model_id="tiny") == made
  assert kvjax.Plan(SnapKV(window=5), kvjax.Calibrated(made, 0.9))
