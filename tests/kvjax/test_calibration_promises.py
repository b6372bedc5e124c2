"""What the record of a calibration promises, says and saves."""

import dataclasses

import numpy as np
import pytest
from triples import RETENTIONS, triples, wide_triples

import kvjax
from kvjax.calibration.conformal import TARGETS, add_promises, promises
from kvjax.calibration.features import Features
from kvjax.calibration.fitting import fit
from kvjax.calibration.measured import Triples
from kvjax.calibration.record import Calibration
from kvjax.calibration.rules import choose, cross_validate, r2
from kvjax.errors import InputError
from kvjax.methods import KeyDiff, SnapKV

RECORD = Calibration(0.0, -3.0, "tiny", "KeyDiff", False, (0.2, 1.0), 0.0, 1)


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
