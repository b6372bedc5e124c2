"""Curves that are fitted to triples: records, tables and pictures of them."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.experiments.calibration import fits, pictures, tables
from kvjax.experiments.calibration.measuring import Measurement
from kvjax.experiments.candidates import candidates

METHODS = ["keydiff", "snapkv:window=4"]
TAU = 0.9


def made(task, sample, share, nll, kc, name="keydiff"):
  """What a context that follows the curve exactly would have given."""
  ratio = np.expm1(share * kc) / np.expm1(kc)
  return Measurement(
    task=task,
    length=128,
    sample=sample,
    asked=f"{task} {sample}",
    method=name,
    options="",
    budget=f"{share:g}",
    retention=share,
    context_tokens=100,
    kept_tokens=100 * share,
    nll=nll,
    full=1.0,
    kept=float(1.001 / ratio - 0.001),
  )


@pytest.fixture(scope="module")
def fitted():
  chosen = candidates(METHODS, [kvjax.Retention(0.2), kvjax.Retention(0.5)])
  found = [
    made(task, sample, share, nll, alpha * nll - 6, name)
    for name, alpha in zip(METHODS, (2, 1), strict=True)
    for task, nll in (("easy", 0.5), ("hard", 2.5))
    for share in (0.2, 0.5)
    for sample in range(2)
  ]
  fitted = fits.fit(chosen[1:], found, "abc")
  # Tried: at 0.2 as the curve has it, at 0.9 whole.
  tried = [
    dataclasses.replace(m, kept_tokens=kept, budget=f"auto at {asked:g}")
    for m in found
    for asked, share, kept in ((0.2, 0.2, 20), (0.9, 0.5, 100))
    if m.retention == share
  ]
  fitted = fits.add_promises(fitted, [0.2, 0.9], tried)
  # Held out: each keeps exactly what it is allowed.
  return [
    dataclasses.replace(
      method, held_out=[m for m in method.measured if m.retention == 0.5]
    )
    for method in fitted
  ]


def test_a_record_reloads_and_says_the_same(fitted, tmp_path):
  path = tmp_path / "record.json"
  nll, lengths = np.array([0.5, 2.5]), np.array([100, 100])
  for method, alpha in zip(fitted, (2, 1), strict=True):
    line = method.calibration
    assert (line.alpha, line.beta) == pytest.approx((alpha, -6), rel=1e-3)
    assert line.method == str(kvjax.get_method(method.name))
    assert line.triples == 8
    line.save(path)
    again = kvjax.Calibration.load(path, model_id="abc")
    np.testing.assert_array_equal(
      again.retentions(nll, lengths, TAU), line.retentions(nll, lengths, TAU)
    )


def test_a_record_knows_what_its_curve_is_worth(fitted):
  """What was kept whole tells nothing, so that 0.9 is no better than 0.2."""
  for method, alpha in zip(fitted, (2, 1), strict=True):
    bent = alpha * np.array([0.5, 2.5]) - 6
    easy, hard = np.expm1(0.2 * bent) / np.expm1(bent)
    kept = pytest.approx((2 * easy + 2 * hard) / 5, rel=1e-3)
    assert method.calibration.promises == ((0.2, kept), (0.9, kept))


def test_pictures_show_the_curves_and_the_means(fitted):
  figure = pictures.ratio_curves(fitted, "title")
  axes = figure.axes[1]
  assert axes.get_title(loc="left") == METHODS[1]
  curve, points = axes.get_lines()[2:4]
  x, y = curve.get_data()
  kc = 1 * 2.5 - 6
  np.testing.assert_allclose(y, np.expm1(x * kc) / np.expm1(kc), atol=2e-3)
  expected = np.expm1(np.array([0.2, 0.5]) * kc) / np.expm1(kc)
  np.testing.assert_allclose(points.get_ydata(), expected, atol=1e-6)
  bars = pictures.retention_bars(fitted, TAU, "title").axes[0]
  assert [bar.get_width() for bar in bars.patches] == [50.0, 50.0]


def test_the_summary_holds_means_by_task(fitted):
  row = fitted[0].row(TAU)
  assert row["method"] == "keydiff"
  assert row["options"] == str(kvjax.get_method("keydiff"))
  assert row["asked"] == 1
  assert row["tried"]["0.9"] > row["tried"]["0.2"]
  assert row["tasks"]["hard"]["nll"] == 2.5
  assert row["tasks"]["hard"]["samples"] == 2
  assert row["held_out"]["retention"] == 0.5
  assert row["tasks"]["easy"]["ratio"] > row["held_out"]["ratio"]
  summary = {"rows": [method.row(TAU) for method in fitted], "tau": TAU}
  first, by_share, by_asked, reached, _ = tables.tables(summary)
  assert first.lines[0][:3] == ("keydiff", "+2", "−6")
  assert first.lines[0][5] == "100 %"
  assert by_share.header == ["method", "20 %", "50 %"]
  assert by_asked.header == ["method", "20 %", "90 %"]
  assert reached.lines[0] == ["NLL of the context", "0.50", "2.50"]
  assert reached.lines[1] == ["keydiff", "50.0", "50.0"]
