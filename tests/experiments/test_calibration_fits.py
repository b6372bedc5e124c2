"""Curves that are fitted to triples: records, tables and pictures of them."""

import dataclasses
import json
import re

import numpy as np
import pytest
from made_up_gates import write_kvzap

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.calibration import fits, pictures, tables
from kvjax.experiments.calibration.measuring import Measurement
from kvjax.experiments.calibration.record_files import Auto
from kvjax.experiments.run.candidates import candidates

METHODS = ["keydiff", "snapkv:window=4"]
TAU = 0.9
ORIGIN = fits.Origin("abc", "two tasks", 4)


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
    tail_nll=nll,
    concentration=None,
    skewness=None,
    kurtosis=None,
    full=1.0,
    kept=1.0 - float(np.log(ratio)),
  )


SHARES = (0.2, 0.5, 0.8)
# kc falls with the likelihood, and every context is a little different.
ALPHAS = {"keydiff": 2.0, "snapkv:window=4": 1.0}
TASKS = {"easy": 0.5, "hard": 2.5}


def measurements(first, count, worse=0.0):
  """Measurements of both methods; `worse` bends the curves."""
  return [
    made(task, sample, share, nll, alpha * nll - 6 + worse, name)
    for name, alpha in ALPHAS.items()
    for task, mean in TASKS.items()
    for sample in range(first, first + count)
    for nll in [mean + 0.1 * (sample % 5)]
    for share in SHARES
  ]


@pytest.fixture(scope="module")
def fitted():
  chosen = candidates(METHODS, [kvjax.Retention(s) for s in SHARES])[1:]
  sets = fits.Sets(
    measurements(0, 10), measurements(10, 60), measurements(70, 5)
  )
  return fits.fit(chosen, sets, "prefill", ORIGIN)


def test_a_record_reloads_and_says_the_same(fitted, tmp_path):
  path = tmp_path / "record.json"
  features = kvjax.Features(
    np.array([0.5, 2.5]), np.array([100, 100]), np.array([0.5, 2.5])
  )
  for method, alpha in zip(fitted, ALPHAS.values(), strict=True):
    line = method.calibration
    kc = alpha * np.array([0.5, 2.5]) - 6
    # These curves bend the means, those that made the triples the retention.
    bent = line.curvature(features)[:, None]
    found = np.expm1(np.array(line.shape) * bent) / np.expm1(bent)
    made = np.expm1(np.array(SHARES) * kc[:, None]) / np.expm1(kc)[:, None]
    np.testing.assert_allclose(found, made, atol=0.05)
    assert line.method == str(kvjax.get_method(method.name))
    assert line.triples == 2 * 10 * 3
    assert line.grid == SHARES
    assert (line.model_id, line.data, line.seed) == ORIGIN
    assert dict(line.r2) == pytest.approx(
      {"all": 1, "easy": 1, "hard": 1}, abs=0.03
    )
    line.save(path)
    again = kvjax.Calibration.load(path, model_id="abc")
    np.testing.assert_array_equal(
      again.retentions(features, TAU), line.retentions(features, TAU)
    )


def test_contexts_keep_what_is_promised_and_little_more_than_they_need(fitted):
  for method in fitted:
    budget = kvjax.Calibrated(method.calibration, TAU)
    reached, needed = method.reached_at(TAU), method.needed_at(TAU)
    assert len(reached) == len(needed) == 2 * 5
    for own, least in zip(reached, needed, strict=True):
      assert (own.task, own.sample) == (least.task, least.sample)
      (share,) = budget.retentions(fits.features([own]))
      assert own.retention == share
      same = [
        m
        for m in method.sets.held_out
        if (m.task, m.sample) == (own.task, own.sample)
      ]
      enough = [m.retention for m in same if m.likelihood_ratio >= TAU]
      assert least.retention == min([*enough, 1.0])
    mean = np.mean([min(m.likelihood_ratio, 1) for m in reached])
    assert mean >= TAU


def test_what_keeps_everything_loses_nothing(fitted):
  (method, _) = fitted
  # No target promises more than 120 of 121.
  for whole in method.reached_at(0.999):
    assert (whole.retention, whole.likelihood_ratio) == (1, 1)
    assert whole.kept_tokens == whole.context_tokens == 100


def test_pictures_show_the_curves_and_the_means(fitted):
  figure = pictures.ratio_curves(fitted, "title")
  axes = figure.axes[1]
  assert axes.get_title(loc="left") == METHODS[1]
  curve, points = axes.get_lines()[2:4]
  x, y = curve.get_data()
  line = fitted[1].calibration
  hard = [m for m in fitted[1].sets.triples if m.task == "hard"]
  kc = np.mean(line.curvature(fits.features(hard)))
  bent = np.interp(x, (0, *SHARES, 1), (0, *line.shape, 1))
  expected = np.expm1(bent * kc) / np.expm1(kc)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  means = [
    np.mean([m.likelihood_ratio for m in hard if m.retention == share])
    for share in SHARES
  ]
  np.testing.assert_allclose(points.get_ydata(), means, atol=1e-6)
  bars = pictures.retention_bars(fitted, TAU, "title").axes[0]
  widths = [
    100 * np.mean([m.retention for m in method.reached_at(TAU)])
    for method in fitted
  ]
  assert [bar.get_width() for bar in bars.patches] == pytest.approx(widths)


def test_the_summary_holds_means_by_task(fitted):
  row = fitted[0].row(TAU)
  assert row["method"] == "keydiff"
  assert row["options"] == str(kvjax.get_method("keydiff"))
  assert row["asked"] == fitted[0].calibration.curve_target(TAU)
  held_out = row["held_out"]
  assert held_out["samples"] == 10
  assert held_out["times"] == pytest.approx(
    held_out["kept"] / held_out["needed"], rel=1e-3
  )
  for name in ("times", "capped"):
    low, high = held_out["intervals"][name]
    assert low <= held_out[name] <= high
    assert low < high
  assert row["tasks"]["hard"]["nll"] == pytest.approx(2.7)
  assert row["tasks"]["hard"]["samples"] == 5
  assert row["tasks"]["hard"]["needed"] > row["tasks"]["easy"]["needed"]
  summary = {"rows": [method.row(TAU) for method in fitted], "tau": TAU}
  first, by_share, rules, kept, needed, quality = tables.tables(summary)
  assert first.lines[0][0] == "keydiff"
  assert first.header[1] == "R2"
  assert re.fullmatch(r"0\.\d\d \(0\.\d\d–0\.\d\d\)", first.lines[0][6])
  assert by_share.header == ["method", "20 %", "50 %", "80 %"]
  assert rules.header[-2:] == ["easy", "hard"]
  assert rules.lines[0][-1] == "1.00"
  assert kept.lines[0] == ["NLL of the context", "0.70", "2.70"]
  assert needed.lines[1][0] == quality.lines[1][0] == "keydiff"
  # The qualities of a task that are all but equal.
  row = summary["rows"][0]
  row["r2"] = {**dict(row["r2"]), "hard": -1.9e10}
  assert tables.tables(summary)[2].lines[0][-1] == "< −10"


def test_the_papers_rule_needs_no_other_contexts():
  chosen = candidates(METHODS, [kvjax.Retention(s) for s in SHARES])[1:]
  sets = fits.Sets(measurements(0, 10), [], measurements(70, 5))
  fitted = fits.fit(chosen, sets, "paper", ORIGIN)
  reached = [
    dataclasses.replace(m, budget="auto at 0.9", retention=0.7)
    for m in sets.held_out
    if m.retention == 0.8
  ]
  for method in fits.add_reached(fitted, reached):
    line = method.calibration
    assert (line.preset, line.promises, line.slopes) == ("paper", (), ())
    of_method = [m for m in reached if m.method == method.name]
    assert method.reached_at(TAU) == of_method
    expected = np.mean([m.nll_ratio for m in of_method])
    assert method.row(TAU)["held_out"]["ratio"] == pytest.approx(
      expected, abs=1e-4
    )


def test_a_calibration_is_for_the_file_that_it_was_made_with(tmp_path):
  gate = tmp_path / "gate"
  name = f"kvzap:gate={write_kvzap(gate, 32, 2, 2)}"
  chosen = candidates([name], [kvjax.Retention(s) for s in SHARES])[1:]
  measured = [
    made("easy", sample, share, 0.1 * sample, -3.0, name)
    for sample in range(5)
    for share in SHARES
  ]
  sets = fits.Sets(measured, measured, measured)
  (fitted,) = fits.fit(chosen, sets, "prefill", ORIGIN)
  record = tmp_path / "records" / "kvzap.json"
  record.parent.mkdir()
  fitted.calibration.save(record)

  def automatic():
    auto = Auto.read(0.9, record.parent, "abc")
    return candidates([name], [auto])[1].options

  first = automatic()
  write_kvzap(gate, 32, 2, 2, score_range=[-1, 1])
  with pytest.raises(InputError) as refused:
    automatic()
  said = str(refused.value)
  assert f"the calibration in {record.parent} was made with gate_" in said
  assert said.endswith("calibrate it anew, or restore its files.")
  # Records from before they named files are taken as they are.
  fields = json.loads(record.read_text())
  assert fields.pop("method_files") in said
  record.write_text(json.dumps(fields))
  assert automatic() != first
