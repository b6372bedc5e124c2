"""The fit of a curve, and the choice of its rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from triples import FEATURES, RETENTIONS, plain, triples, wide_triples

import kvjax
from kvjax.calibration.fitting import PAPER, Rule, asymmetric_loss, fit
from kvjax.calibration.measured import Triples
from kvjax.calibration.rules import candidates, choose, cross_validate, r2
from kvjax.calibration.shape import mean_quality, shaped
from kvjax.errors import InputError


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


def rising(values, weight):
  """Returns the nearest values that never fall, in weighted least squares.

  Each is the greatest, over the starts of intervals around it, of the least
  mean over their ends.
  """
  places = range(len(values))

  def mean(i, j):
    own = slice(i, j + 1)
    return np.average(values[own], weights=weight[own])

  return np.array(
    [
      max(min(mean(i, j) for j in places[k:]) for i in places[: k + 1])
      for k in places
    ]
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
    nearest = rising(means, count)
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
