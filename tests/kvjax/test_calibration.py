"""The curve of quality, its inverse, and the record of it."""

import dataclasses
import decimal
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import kvjax
from kvjax.calibration.curve import least_retention, quality
from kvjax.calibration.features import Features, score_shape
from kvjax.calibration.fields import to_json
from kvjax.calibration.record import Calibration
from kvjax.errors import InputError
from kvjax.methods import KeyDiff, SnapKV

BENDS = [-800, -60, -40, -3, -1e-5, 0, 1e-5, 3, 40, 60, 800]


TAUS = [0.5, 0.9, 0.95, 0.999]


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
  features = Features(nll, lengths)
  found = RECORD.retentions(features, 0.5)
  kc = 1.5 * nll[:4].astype(float) - 7
  expected = [
    np.log1p(0.5 * np.expm1(k)) / k
    if k < 0
    else 1 + np.log((1 + np.exp(-k)) / 2) / k
    for k in kc
  ]
  np.testing.assert_allclose(found[:4], expected, rtol=1e-12)
  assert found[4:].tolist() == [1, 1, 1]
  assert RECORD.retentions(features, 1.0).tolist() == [1] * 7
  least = dataclasses.replace(RECORD, alpha=0.0, beta=-800.0)
  one = Features(nll[:1], np.array([100]))
  assert least.retentions(one, 0.5).tolist() == [0.01]
  assert type(kvjax.Retention(float(found[0]))) is kvjax.Retention


def test_a_curve_is_asked_for_as_much_as_it_takes():
  """More if it promises too much, and less if it is too cautious."""
  kept = ((0.3, 0.6), (0.9, 0.7), (0.95, 0.96))
  record = dataclasses.replace(RECORD, promises=kept)
  taus = [0.4, 0.55, 0.65, 0.95, 0.96, 0.97]
  asked = [0.3, 0.3, 0.9, 0.95, 0.95, 1.0]
  assert [record.curve_target(tau) for tau in taus] == asked
  assert [RECORD.curve_target(tau) for tau in taus] == taus
  features = Features(np.array([0.5, 3.0]), np.array([100, 100]))
  for tau, target in zip(taus, asked, strict=True):
    found = kvjax.Calibrated(record, tau).retentions(features)
    expected = kvjax.Calibrated(RECORD, target).retentions(features)
    np.testing.assert_array_equal(found, expected)


PREFILL = dataclasses.replace(
  RECORD,
  preset="prefill",
  grid=(0.1, 0.25, 0.5, 0.6, 0.9),
  shape=(0.3, 0.5, 0.7, 0.7, 0.95),
)


def test_a_retention_is_the_least_measured_one_of_enough_quality():
  """The curve bends the mean quality of all contexts at each retention."""
  nll = np.linspace(0, 9, 200)
  features = Features(nll, np.full(200, 1000))
  for target in (0.05, 0.5, 0.9):
    expected = []
    for kc in 1.5 * nll - 7:
      curve = [exact(mean, kc) for mean in PREFILL.shape]
      enough = [
        r
        for r, quality in zip(PREFILL.grid, curve, strict=True)
        if quality >= target - 1e-9
      ]
      expected.append(min(enough, default=1.0))
    found = PREFILL.retentions(features, target)
    assert found.tolist() == expected
    assert len(set(found)) > 2
    assert 0.6 not in found  # No better than less.
  assert PREFILL.retentions(features, 1.0).tolist() == [1] * 200


def test_without_a_slope_all_contexts_keep_the_same():
  same = dataclasses.replace(PREFILL, alpha=0.0, beta=0.0)
  features = Features(np.linspace(0, 9, 20), np.full(20, 1000))
  targets = (0.3, 0.31, 0.5, 0.7, 0.71, 0.951)
  for target, share in zip(
    targets, (0.1, 0.25, 0.25, 0.5, 0.9, 1), strict=True
  ):
    assert same.retentions(features, target).tolist() == [share] * 20


def test_the_curve_of_the_paper_warns_where_it_extrapolates():
  record = dataclasses.replace(RECORD, grid=(0.1, 0.5, 0.9))
  inside = Features(np.array([3.0]), np.array([100]))
  assert 0.1 < record.retentions(inside, 0.5)[0] < 0.9
  outside = Features(np.array([9.0]), np.array([100]))
  with pytest.warns(kvjax.InputWarning, match=r"0\.9\d+, and was measured f"):
    found = record.retentions(outside, 0.7)
  np.testing.assert_array_equal(found, RECORD.retentions(outside, 0.7))
  assert record.retentions(outside, 1.0).tolist() == [1]


def test_features_out_of_range_are_clamped_with_a_warning():
  ranges = (("nll", 1.0, 4.0), ("length", 500.0, 1000.0))
  slopes = (("log_length", 0.5),)
  record = dataclasses.replace(RECORD, ranges=ranges, slopes=slopes)
  free = dataclasses.replace(record, ranges=())
  nll, length = np.array([0.2, 3.0, 9.0, 4.1]), np.array([700, 90, 2000, 500])
  with pytest.warns(
    kvjax.InputWarning, match="nll of 1 to 4 and length of 500"
  ):
    found = record.retentions(Features(nll, length), 0.7)
  clamped = Features(np.clip(nll, 1, 4), np.clip(length, 500, 1000))
  np.testing.assert_array_equal(found, free.retentions(clamped, 0.7))
  # Within a tenth of the range's ends, nothing is said.
  near = Features(np.array([0.95, 4.3]), np.array([480, 1050]))
  clamped = Features(np.array([1.0, 4.0]), np.array([500, 1000]))
  found = record.retentions(near, 0.7)
  np.testing.assert_array_equal(found, free.retentions(clamped, 0.7))


def test_by_the_rule_of_the_prefill_contexts_far_out_of_range_keep_everything():
  """Each feature alone is enough, also one that the curve does not read."""
  record = dataclasses.replace(
    RECORD,
    preset="prefill",
    grid=(0.1, 0.5, 0.9),
    shape=(0.1, 0.5, 0.9),
    ranges=(("nll", 1.0, 4.0), ("length", 500.0, 1000.0)),
  )
  nll = np.array([2.0, 0.2, 9.0, 2.0, 2.0, 4.3])
  length = np.array([700, 700, 700, 90, 2000, 1050])
  with pytest.warns(kvjax.InputWarning, match="others keep everything"):
    found = record.retentions(Features(nll, length), 0.5)
  assert found[0] < 1
  assert found[1:5].tolist() == [1, 1, 1, 1]
  assert found[5] < 1


def test_a_rule_on_more_features():
  slopes = (("tail_nll", 0.5), ("concentration", -2.0), ("log_length", 0.25))
  record = dataclasses.replace(RECORD, slopes=slopes)
  features = Features(
    np.array([2.0, 3.0, 1.0]),
    np.array([100, 200, 300]),
    np.array([1.0, 4.0, 2.0]),
    np.array([0.1, 0.7, np.nan]),
  )
  kc = [
    1.5 * 2 - 7 + 0.5 - 0.2 + 0.25 * np.log(100),
    1.5 * 3 - 7 + 2 - 1.4 + 0.25 * np.log(200),
  ]
  found = record.retentions(features, 0.8)
  np.testing.assert_allclose(found[:2], least_retention(0.8, np.array(kc)))
  assert found[2] == 1
  assert record.depends_on == {"nll", *(name for name, _ in slopes)}
  assert record.formula == (
    "kc = 1.5 NLL - 7 + 0.5 tail_nll - 2 concentration + 0.25 log_length"
  )
  assert PREFILL.formula == "kc = 1.5 NLL - 7"
  missing = features._replace(concentration=None)
  assert record.retentions(missing, 0.8).tolist() == [1, 1, 1]


def test_the_shape_of_scores_is_that_of_a_loop_over_heads():
  rng = np.random.default_rng(0)
  scores = rng.gamma(0.3, size=(3, 2, 50)).astype(np.float32)
  scored = rng.random(scores.shape) < 0.7
  scores[0, 0, :3] = -np.inf, np.nan, np.inf
  expected = []
  for row, mask in zip(scores, scored, strict=True):
    heads = []
    for head, part in zip(row, mask, strict=True):
      x = head[part & np.isfinite(head)].astype(float)
      w = (x - x.min()) / (x - x.min()).sum()
      z = (x - x.mean()) / x.std()
      heads.append((np.log(len(w) * np.sum(w**2)), *scipy_moments(x)))
      np.testing.assert_allclose(heads[-1][1:], (np.mean(z**3), np.mean(z**4)))
    expected.append(np.mean(heads, axis=0))
  scores, scored = jnp.asarray(scores), jnp.asarray(scored)
  found = score_shape(scores, scored)
  np.testing.assert_allclose(found.T, expected, rtol=1e-4)
  finite = jnp.where(jnp.isfinite(scores), scores, 0.5)
  moved = score_shape(1e4 * finite - 3e3, scored)
  np.testing.assert_allclose(moved, score_shape(finite, scored), rtol=1e-2)


def scipy_moments(x):
  return scipy.stats.skew(x), scipy.stats.kurtosis(x, fisher=False)


def test_scores_from_none_to_all():
  one = jnp.zeros((1, 1, 64))
  every = jnp.ones(one.shape, bool)
  equal = jnp.full(one.shape, 0.1)
  for scores, scored in ((one, every), (one, ~every), (equal, every)):
    assert score_shape(scores, scored).tolist() == [[0]] * 3
  one = one.at[..., 5].set(3.0)
  # A single one of n: z is (n - 1)^0.5 for it, -(n - 1)^-0.5 for the others.
  root = 63**0.5
  third = (root**3 - 63 / root**3) / 64
  fourth = (root**4 + 63 / root**4) / 64
  np.testing.assert_allclose(
    score_shape(one, every)[:, 0], [np.log(64), third, fourth], rtol=1e-5
  )


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ("nothing", "cannot be read: No such file"),
    ("{", "is no JSON"),
    ("[1]", "it holds no fields"),
    ({"alpha": None}, "its fields are beta"),
    ({"gamma": 1.0}, "method_files, gamma, not alpha"),
    ({"preset": "other"}, "preset is 'other'"),
    ({"token_weights": [[0.5, 1.0]]}, r"token_weights is \[\[0.5, 1.0\]\]"),
    ({"token_weights": [5]}, r"token_weights is \[5\]"),
    ({"token_weights": [[5, 1.0]]}, "it alone has token_weights"),
    ({"preset": "recite", "grid": [0.5]}, '"recite" has no curve'),
    ({"preset": "prefill", "grid": []}, "measured retentions ascending"),
    ({"grid": [0.5, 0.2]}, "measured retentions ascending"),
    ({"slopes": [["nll", 1.0]]}, r"slopes is \[\['nll', 1.0\]\]"),
    ({"slopes": {"other": 1.0}}, "slopes of nll, tail_nll"),
    ({"ranges": {"nll": [2.0, 1.0]}}, "ranges of nll, length"),
    ({"ranges": {"nll": 2.0}}, "ranges is"),
    ({"shape": [0.5]}, "a shape that never falls"),
    (
      {"preset": "prefill", "grid": [0.2, 0.5], "shape": [0.8, 0.7]},
      "a shape that never falls",
    ),
    ({"preset": "prefill", "grid": [0.2], "shape": []}, "a shape that never"),
    ({"shape": [True]}, r"shape is \[True\]"),
    ({"r2": {"all": float("nan")}}, "finite numbers"),
    ({"seed": 0.5}, "seed is 0.5"),
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
    fields = to_json(dataclasses.asdict(RECORD)) | change
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
      lambda b: kvjax.Plan(KeyDiff(), b, schedule=kvjax.Schedule(block=8)),
      "cannot work with blocks of 8",
    ),
    (
      lambda b: kvjax.Plan(KeyDiff(), b, schedule=kvjax.Schedule(every=2)),
      "cannot work with every 2",
    ),
    (
      lambda b: dataclasses.replace(
        kvjax.get_plan("flat/keydiff@0.5", kvjax.Tokens(4)), budget=b
      ),
      "after flat has indexed",
    ),
    (lambda b: kvjax.get_plan("flat", b), "flat loses nothing"),
  ],
)
def test_plans_that_a_calibration_does_not_suit_are_refused(make, said):
  with pytest.raises(InputError, match=said):
    make(kvjax.Calibrated(RECORD, 0.9))
