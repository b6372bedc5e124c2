"""The curve of quality, its inverse, the fit, and the record of it."""

import dataclasses
import decimal
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.calibration.fitting import Triples, asymmetric_loss, fit, promises
from kvjax.calibration.record import Calibration, least_retention, quality
from kvjax.errors import InputError
from kvjax.methods import KeyDiff, SnapKV

BENDS = [-800, -60, -40, -3, -1e-5, 0, 1e-5, 3, 40, 60, 800]
TAUS = [0.5, 0.9, 0.95, 0.999]
RETENTIONS = [0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 0.9]
RECORD = Calibration(
  alpha=1.5,
  beta=-7.0,
  model_id="tiny",
  method=str(KeyDiff()),
  per_query_head=False,
  tau_range=(0.2, 1.0),
  error=0.05,
  triples=70,
)


def exact(retention, kc):
  """The paper's formula in 60 digits."""
  with decimal.localcontext(prec=60):
    if kc == 0:
      return retention
    r, k = decimal.Decimal(float(retention)), decimal.Decimal(float(kc))
    lost = (-k).exp()
    return float(((r * k - k).exp() - lost) / (1 - lost))


def plain(retention, kc):
  """The same in float64, where that is well conditioned."""
  return np.expm1(retention * kc) / np.expm1(kc)


def wide(function, *args):
  """A function of float64 arrays, traced."""
  with jax.enable_x64(True):
    args = [jnp.asarray(x, jnp.float64) for x in args]
    return np.asarray(jax.jit(function)(*args))


def pairs():
  return [x.ravel() for x in np.meshgrid(np.linspace(0, 1, 21), BENDS)]


def test_the_curve_is_the_papers():
  r, kc = pairs()
  expected = [exact(*pair) for pair in zip(r, kc, strict=True)]
  np.testing.assert_allclose(wide(quality, r, kc), expected, atol=1e-11)
  narrow = quality(jnp.asarray(r, jnp.float32), jnp.asarray(kc, jnp.float32))
  np.testing.assert_allclose(narrow, expected, rtol=0, atol=3e-5)
  assert np.all(narrow[r == 0] == 0)
  assert np.all(narrow[r == 1] == 1)


def test_the_curve_has_no_steps():
  """Where one form of it follows another, and in between."""
  r = np.full(400, 0.3)
  edges = np.array([-1e-4, 1e-4])[:, None] * (1 + np.linspace(-1e-6, 1e-6, 200))
  found = wide(quality, r, edges.ravel())
  np.testing.assert_allclose(found, 0.3 - 0.105 * edges.ravel(), atol=1e-9)


def test_slopes_are_finite_and_right():
  r, kc = pairs()
  by_kc = wide(jax.vmap(jax.grad(quality, argnums=1)), r, kc)
  by_r = wide(jax.vmap(jax.grad(quality, argnums=0)), r, kc)
  assert np.all(np.isfinite(by_kc))
  assert np.all(np.isfinite(by_r))
  flat = np.abs(kc) < 1e-3
  np.testing.assert_allclose(by_kc[flat], (r * (r - 1) / 2)[flat], atol=1e-6)
  step = 1e-5
  some = np.abs(kc) == 3
  slopes = [
    (exact(x, k + step) - exact(x, k - step)) / (2 * step)
    for x, k in zip(r[some], kc[some], strict=True)
  ]
  np.testing.assert_allclose(by_kc[some], slopes, atol=1e-8)


@pytest.mark.parametrize("tau", TAUS)
def test_the_inverse_returns_to_the_curve(tau):
  bends = np.array(BENDS, float)
  found = least_retention(tau, bends)
  back = [exact(*pair) for pair in zip(found, bends, strict=True)]
  np.testing.assert_allclose(back, tau, atol=1e-10)


def test_it_is_the_smallest_retention_of_enough_quality():
  """By trying 4,001 of them; the curve never falls."""
  rng = np.random.default_rng(0)
  grid = np.linspace(0, 1, 4001)
  for kc in [*rng.uniform(-60, 60, 40), *rng.uniform(-3, 3, 40)]:
    curve = wide(quality, grid, np.full(4001, kc))
    assert np.all(np.diff(curve) >= 0)
    tau = float(rng.uniform(0.05, 1))
    first = grid[np.argmax(curve >= tau)]
    found = float(least_retention(tau, np.array([kc]))[0])
    assert first - 1 / 4000 < found <= first + 1e-12


def test_retentions_of_contexts():
  nll = np.array([0.0, 4.0, 4.7, 1.0, np.nan, np.inf, 2.0], np.float32)
  lengths = np.array([10_000, 500, 500, 20, 9, 9, 1])
  found = RECORD.retentions(nll, lengths, 0.5)
  kc = 1.5 * nll[:4].astype(float) - 7
  expected = [
    np.log1p(0.5 * np.expm1(k)) / k
    if k < 0
    else 1 + np.log((1 + np.exp(-k)) / 2) / k
    for k in kc
  ]
  np.testing.assert_allclose(found[:4], expected, rtol=1e-12)
  assert found[4:].tolist() == [1, 1, 1]
  assert RECORD.retentions(nll, lengths, 1.0).tolist() == [1] * 7
  least = dataclasses.replace(RECORD, alpha=0.0, beta=-800.0)
  assert least.retentions(nll[:1], np.array([100]), 0.5).tolist() == [0.01]
  assert type(kvjax.Retention(float(found[0]))) is kvjax.Retention


def test_more_is_asked_of_a_curve_that_promises_too_much():
  kept = ((0.5, 0.6), (0.9, 0.7), (0.95, 0.96))
  record = dataclasses.replace(RECORD, promises=kept)
  taus = [0.4, 0.55, 0.65, 0.95, 0.96, 0.97]
  asked = [0.5, 0.55, 0.9, 0.95, 0.96, 1.0]
  assert [record.curve_target(tau) for tau in taus] == asked
  assert [RECORD.curve_target(tau) for tau in taus] == taus
  nll, lengths = np.array([0.5, 3.0]), np.array([100, 100])
  for tau, more in zip(taus, asked, strict=True):
    found = kvjax.Calibrated(record, tau).retentions(nll, lengths)
    expected = kvjax.Calibrated(RECORD, more).retentions(nll, lengths)
    np.testing.assert_array_equal(found, expected)
    assert np.all(found >= RECORD.retentions(nll, lengths, tau))


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
  np.testing.assert_allclose(found, (alpha, beta, 0), atol=1e-6)


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
  r, nll, y = data

  def loss(alpha, beta):
    error = plain(r, alpha * nll + beta) - y
    return np.mean(np.where(error > 0, 4, 1) * error**2)

  near = np.linspace(-0.5, 0.5, 41)
  least = min(
    loss(found.alpha + a, found.beta + b) for a in near for b in 3 * near
  )
  best = loss(found.alpha, found.beta)
  assert best <= least
  line = np.array(found[:2])
  np.testing.assert_allclose(wide(asymmetric_loss, line, *data), best)


def test_promising_too_much_weighs_four_times():
  """Alike contexts: the curve passes through the expectile of 1/5."""
  y = np.array([0.2, 0.3, 0.5, 0.6, 0.9])
  found = fit(Triples(np.full(5, 0.4), np.full(5, 2.0), y))
  grid = np.linspace(0, 1, 100_001)[:, None]
  error = grid - y
  losses = np.mean(np.where(error > 0, 4, 1) * error**2, axis=1)
  through = exact(0.4, found.alpha * 2 + found.beta)
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


def test_the_ratio_of_likelihoods():
  full, kept = np.array([1.0, 0.0, 2.0, 0.5]), np.array([2.0, 0.0, 1.0, np.inf])
  np.testing.assert_allclose(
    kvjax.nll_ratio(full, kept), [1.001 / 2.001, 1, 1.5, 0]
  )


def test_a_record_is_saved_and_loaded(tmp_path):
  data = triples(2, -9, noise=0.1)
  made = kvjax.calibrate(data, model_id="tiny", method=SnapKV(window=5))
  found = fit(data)
  assert (made.alpha, made.beta, made.error) == found
  assert made.triples == 80 * 7
  assert made.tau_range == (data.ratio.min(), 1.0)
  assert made.promises == ()
  made = dataclasses.replace(made, promises=((0.5, 0.25), (0.9, 0.75)))
  path = tmp_path / "snapkv.json"
  made.save(path)
  assert Calibration.load(path, model_id="tiny") == made
  assert kvjax.Plan(SnapKV(window=5), kvjax.Calibrated(made, 0.9))


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ("nothing", "cannot be read: No such file"),
    ("{", "is no JSON"),
    ("[1]", "it holds no fields"),
    ({"alpha": None}, "its fields are beta"),
    ({"gamma": 1.0}, "promises, gamma, not alpha"),
    ({"alpha": "1"}, "alpha is '1'"),
    ({"triples": True}, "triples is True"),
    ({"per_query_head": 0}, "per_query_head is 0"),
    ({"tau_range": [1.0]}, r"tau_range is \[1.0\]"),
    ({"tau_range": [0.9, 0.1]}, "tau_range and promises within"),
    ({"promises": [[0.9]]}, r"promises is \[\[0.9\]\]"),
    ({"promises": [[0.9, 0.8], [0.5, 0.9]]}, "the latter ascending"),
    ({"promises": [[0.9, 1.1]]}, "promises within 0 and 1"),
    ({"beta": float("nan")}, "finite numbers"),
    ({"triples": 0}, "at least one triple"),
    ({"model_id": "other"}, "model 'other'; 'tiny' needs one of its own"),
  ],
)
def test_a_damaged_record_is_refused(tmp_path, change, said):
  path = tmp_path / "record.json"
  if isinstance(change, dict):
    fields = dataclasses.asdict(RECORD) | change
    change = json.dumps({k: v for k, v in fields.items() if v is not None})
  if change != "nothing":
    path.write_text(change)
  with pytest.raises(InputError, match=said):
    Calibration.load(path, model_id="tiny")


def test_a_record_that_cannot_be_written_is_said(tmp_path):
  with pytest.raises(InputError, match=r"record\.json cannot be written: No"):
    RECORD.save(tmp_path / "none" / "record.json")


@pytest.mark.parametrize("tau", [0.0, -0.5, 1.1, float("nan")])
def test_tau_outside_its_range_is_refused(tau):
  with pytest.raises(InputError, match="above 0 and at most 1"):
    kvjax.Calibrated(RECORD, tau)


@pytest.mark.parametrize(
  ("make", "said"),
  [
    (lambda b: kvjax.Plan(SnapKV(), b), r"that of KeyDiff.*SnapKV.*its own"),
    (lambda b: kvjax.Plan(KeyDiff(recent_frac=0.5), b), "of its own"),
    (
      lambda b: kvjax.Plan(KeyDiff(), b, per_query_head=True),
      "each query head",
    ),
    (
      lambda b: kvjax.Plan(KeyDiff(), b, kvjax.Schedule(block=8)),
      "cannot work with blocks of 8",
    ),
    (
      lambda b: kvjax.Plan(KeyDiff(), b, kvjax.Schedule(every=2)),
      "cannot work with every 2",
    ),
    (
      lambda b: dataclasses.replace(
        kvjax.get_plan("flat/keydiff@0.5", kvjax.Tokens(4)), budget=b
      ),
      "after Flat has indexed",
    ),
    (lambda b: kvjax.get_plan("flat", b), "flat loses nothing"),
  ],
)
def test_plans_that_a_calibration_does_not_suit_are_refused(make, said):
  with pytest.raises(InputError, match=said):
    make(kvjax.Calibrated(RECORD, 0.9))
