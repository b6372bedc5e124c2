"""Calibrating: triples on disk, records found, contexts that set budgets."""

import dataclasses
import json
import math
import pathlib
import random

import matplotlib.image
import numpy as np
import pytest

import kvjax
import models
from experiments import comparison
from experiments.benchmarks import ruler
from experiments.calibration import fits, measuring, pictures, tables
from experiments.calibration.measuring import Measurement, Measurements
from experiments.calibration.records import FOLDER, Auto, file_name
from experiments.candidates import DEFAULT, FULL, candidates, parse_budgets
from experiments.results import Part, Results, Settings, digest
from experiments.tasks import fitting, needles
from experiments.tasks.sample import Sample
from kvjax.calibration import least_retention
from kvjax.errors import InputError
from kvjax.methods import get_method
from kvjax.schedules import WHOLE

SETTINGS = Settings("tiny", "abc", "float32", 0)
METHODS = ["keydiff", "snapkv:window=4"]
TAU = 0.9
SENTENCE = " The grass is green and the sky is blue."


def a_sample(task, number):
  return Sample(
    context=f"Number {number}." + SENTENCE * (3 + 2 * number) + "\n",
    question="What is green?",
    answer_prefix=" It is",
    answers=("the", "grass"),
    task=task,
    max_new_tokens=4,
    metadata={},
  )


ONE, TWO = Part("one", 128), Part("two", 128)
PAIR = {ONE: [a_sample("one", number) for number in range(2)]}
SAMPLES = {**PAIR, TWO: [a_sample("two", 1)]}


def a_record(name, alpha=0.0, beta=-3.0, per_query_head=False, model="abc"):
  return kvjax.Calibration(
    alpha,
    beta,
    model,
    str(get_method(name)),
    per_query_head,
    (0.1, 1.0),
    0.05,
    9,
  )


def automatic(folder, *records, tau=TAU):
  folder.mkdir(exist_ok=True)
  for index, record in enumerate(records):
    record.save(folder / f"{index}.json")
  return Auto.read(tau, folder, "abc")


def pair_nll(lm):
  """NLL(c) of the pair's contexts."""
  texts = [lm.tokenizer.split_chat(sample.context)[0] for sample in PAIR[ONE]]
  prompts = kvjax.Prompts.of([lm.tokenizer.encode(text) for text in texts])
  found = kvjax.negative_log_likelihood(lm.model, lm.params, prompts)
  return np.asarray(found).tolist()


def test_an_automatic_answer_is_that_at_the_retention_it_reaches(
  tiny, tmp_path
):
  nll = pair_nll(tiny)
  # One context's curve is bent by -12, the other's is straight.
  low, high = sorted(nll)
  alpha, beta = 12 / (high - low), -12 - 12 * low / (high - low)
  auto = automatic(tmp_path / "records", a_record("keydiff", alpha, beta))
  bent = [alpha * value + beta for value in nll]
  shares = least_retention(TAU, np.array(bent)).tolist()
  assert abs(shares[0] - shares[1]) > 0.5
  fixed = kvjax.Retention(min(shares))
  chosen = candidates(["keydiff"], [auto, fixed])[1:]
  results = Results(tmp_path / "answers", SETTINGS)
  comparison.compare(tiny, chosen, PAIR, results, 2, lambda task, new: None)
  found = {(a.sample, a.budget): a for a in results.answers.values()}
  for number, share in enumerate(shares):
    own = found[number, "auto at 0.9"]
    assert own.retention == pytest.approx(share, rel=1e-3)
    assert own.kept_tokens == math.ceil(share * own.context_tokens)
    assert "kc = " in own.options
  tight = shares.index(min(shares))
  own, same = (found[tight, c.budget] for c in chosen)
  assert own.kept_tokens == same.kept_tokens
  assert own.prediction == same.prediction
  assert same.retention == min(shares)


def test_another_calibration_is_asked_anew(tmp_path):
  """Its answers are not taken for those of the first."""
  one, other = (
    candidates(
      ["keydiff"], [automatic(tmp_path, a_record("keydiff", beta=beta))]
    )[1]
    for beta in (-3.0, -4.0)
  )
  assert one.budget == other.budget
  assert not set(comparison.wanted([one], SAMPLES)) & set(
    comparison.wanted([other], SAMPLES)
  )


def test_what_cannot_be_automatic_is_refused_in_a_sentence(tmp_path):
  auto = automatic(tmp_path / "own", a_record("keydiff"))

  def refused(name, schedule=WHOLE, **options):
    with pytest.raises(InputError, match=f"^--methods has {name}: ") as caught:
      candidates([name], [auto], schedule, **options)
    return str(caught.value)

  sentence = refused("snapkv")
  assert f"{tmp_path / 'own'} has no calibration of it" in sentence
  assert "experiments.calibrate --methods=snapkv," in sentence
  assert "--heads=query" in refused("keydiff", per_query_head=True)
  assert "keeps everything" in refused("quest")
  assert "blocks of 64" in refused("keydiff", kvjax.Schedule(block=64))
  assert "whole prompt" in refused("keydiff", kvjax.Schedule(every=4))
  foreign = a_record("keydiff", model="other")
  with pytest.raises(InputError, match="that of the model 'other'"):
    automatic(tmp_path / "foreign", foreign)
  (tmp_path / "own" / "notes.json").write_text("{}")
  with pytest.raises(InputError, match=r"notes\.json is no calibration"):
    Auto.read(TAU, tmp_path / "own", "abc")
  with pytest.raises(InputError, match=r"at most 1; 1\.5"):
    candidates(
      ["keydiff"], [automatic(tmp_path / "new", a_record("keydiff"), tau=1.5)]
    )


def test_auto_stands_beside_numbers(tmp_path):
  auto = automatic(tmp_path)
  half = kvjax.Retention(0.5)
  assert parse_budgets(["auto ", "0.5"], None, auto) == [auto, half]
  with pytest.raises(InputError, match=r"could not convert string .* 'auto'"):
    parse_budgets(["auto"], None)


def test_files_of_records_are_told_apart():
  names = ["pyramid/ada/keydiff", "lagkv:lag=128", "lagkv:lag=12", "lagkv"]
  files = {file_name(name, own) for name in names for own in (True, False)}
  assert len(files) == 8
  assert not any(set(name) & set("/:") for name in files)


CHOSEN = candidates(
  ["snapkv:window=4"], [kvjax.Retention(0.45), kvjax.Retention(0.5)]
)[1:]


def measured(lm, folder, on_new=lambda task, new: None, chosen=CHOSEN):
  store = Measurements(
    folder / "triples.jsonl", SETTINGS, Measurement, "measurement"
  )
  return measuring.measure(lm, chosen, SAMPLES, store, 2, on_new)


def test_triples_are_those_of_a_context_alone(tiny, tmp_path):
  found = measured(tiny, tmp_path)
  assert len(found) == 2 * 3
  plan = CHOSEN[-1].plan
  sample = SAMPLES[ONE][0]
  before, after = tiny.tokenizer.split_chat(sample.context)
  encode = tiny.tokenizer.encode
  context = kvjax.Prompts.of([encode(before)])
  question = kvjax.Prompts.of([encode(f"What is green?{after} It is")])
  answer = kvjax.Prompts.of([encode(" the, and grass")])

  whole = kvjax.get_plan("full", kvjax.Retention(1.0))
  caches, _ = kvjax.sweep(tiny.model, tiny.params, context, [plan, whole])
  kept, full = (
    kvjax.answer_nll(tiny.model, tiny.params, cache, question, answer).item()
    for cache in caches
  )
  (own,) = (
    m for m in found if (m.task, m.sample, m.budget) == ("one", 0, "0.5")
  )
  assert own.kept == pytest.approx(kept, rel=1e-4)
  assert own.full == pytest.approx(full, rel=1e-4)
  assert own.kept != pytest.approx(own.full, rel=1e-4)
  assert own.nll == pytest.approx(pair_nll(tiny)[0], rel=1e-4)
  assert own.context_tokens == context.lengths[0]
  assert own.kept_tokens == -(-own.context_tokens // 2)
  expected = (own.full + 1e-3) / (own.kept + 1e-3)
  assert own.ratio == pytest.approx(expected)


def test_a_cut_line_is_measured_again_and_nothing_else(
  tiny, tmp_path, monkeypatch
):
  whole = measured(tiny, tmp_path)
  path = tmp_path / "triples.jsonl"
  lines = path.read_bytes()
  path.write_bytes(lines[:-5])
  sweeps = []
  sweep = kvjax.measured_sweep

  def counted(model, params, prompts, plans):
    sweeps.append(len(plans))
    return sweep(model, params, prompts, plans)

  monkeypatch.setattr(kvjax, "measured_sweep", counted)
  told = []
  again = measured(tiny, tmp_path, lambda task, new: told.append((task, new)))
  assert told == [("two", 1)]
  assert sweeps == [2]
  assert [m.key for m in again] == [m.key for m in whole]
  np.testing.assert_allclose(
    [m.kept for m in again], [m.kept for m in whole], rtol=1e-5
  )
  assert path.read_bytes().count(b"\n") == lines.count(b"\n")
  measured(tiny, tmp_path)
  assert sweeps == [2]


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
  fitted = fits.promised(fitted, [0.2, 0.9], tried)
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
    assert line.method == str(get_method(method.name))
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
  assert row["options"] == str(get_method("keydiff"))
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


def test_a_method_that_keeps_all_teaches_nothing(tiny):
  chosen = candidates(["keydiff", "lagkv"], [kvjax.Retention(0.2)])[1:]
  with pytest.raises(InputError, match="has lagkv, which keeps all of"):
    measuring.check(tiny, chosen, SAMPLES)


def test_the_program_writes_records_that_compare_reads(
  run_binary, tiny_directory, tmp_path
):
  model = f"--model={tiny_directory}"
  folder = tmp_path / "new" / "calibration"
  asked = ["--methods=streaming", "--length=256", "--samples=1"]
  asked += ["--tasks=niah_single_1"]
  done = run_binary(
    "experiments.calibrate",
    model,
    *asked,
    "--held_out=1",
    "--retention=0.5",
    "--asked=0.9",
    f"--output={folder}",
  )
  assert done.returncode == 0, done.stderr
  assert {path.name for path in folder.iterdir()} == {
    *("triples.jsonl", "tried.jsonl", "held_out.jsonl", "summary.json"),
    *("calibration.md", "ratio_curves.png", "retention_bars.png", "records"),
  }
  assert matplotlib.image.imread(folder / "ratio_curves.png").std() > 0.01
  summary = json.loads((folder / "summary.json").read_text())
  (one,) = summary["rows"]
  assert one["triples"] == 1
  assert one["held_out"]["samples"] == 1
  record = json.loads((folder / "records" / "streaming.json").read_text())
  for field, name in (("alpha", "alpha"), ("method", "options")):
    assert record[field] == one[name]
  ((level, kept),) = record["promises"]
  assert level == 0.9
  assert 0 <= kept <= 0.5

  auto = ["--retention=auto", "--tau=0.9"]
  missing = run_binary("experiments.evaluate", model, *asked, *auto)
  assert missing.returncode == 2
  assert "calibrations has no calibration of it; make one" in missing.stderr
  assert len(missing.stderr.splitlines()) == 1
  output = tmp_path / "compared"
  found = run_binary(
    "experiments.compare",
    model,
    *asked,
    *auto,
    f"--calibrations={folder / 'records'}",
    f"--output={output}",
  )
  assert found.returncode == 0, found.stderr
  rows = json.loads((output / "summary.json").read_text())["rows"]
  assert [row["budget"] for row in rows] == ["1", "auto at 0.9"]
  lines = (output / "samples.jsonl").read_text().splitlines()
  answers = map(json.loads, lines)
  own = [a["retention"] for a in answers if a["options"] == rows[1]["options"]]
  assert rows[1]["retention"] == pytest.approx(np.mean(own), abs=1e-4)
  assert "auto at 0.9: " in found.stdout


def test_a_quality_that_is_none_is_refused_before_anything_runs(
  run_binary, tmp_path
):
  output = tmp_path / "calibration"
  result = run_binary("experiments.calibrate", "--tau=0", f"--output={output}")
  assert result.returncode == 2
  assert result.stderr.startswith("tau is the share of quality that is to be")
  assert not output.exists()


REFERENCE = pathlib.Path(models.__file__).parent / "reference"


@pytest.fixture(scope="module")
def shipped():
  return Auto.read(0.95, REFERENCE / FOLDER, digest(REFERENCE))


@pytest.fixture(scope="module")
def reference():
  return models.load(REFERENCE, "float32")


def test_the_bundled_model_has_a_record_for_every_method(shipped):
  names = [name for name in DEFAULT if name != FULL]
  assert len(candidates(names, [shipped])) == 1 + len(names)
  files = {path.name for path in (REFERENCE / FOLDER).iterdir()}
  assert files == {file_name(name, False) for name in names}


def test_what_nobody_can_foretell_keeps_more(reference, shipped):
  rng = random.Random(7)
  text = fitting.ProseText(rng, "train")
  texts = [
    " ".join(text.sentences(600)),
    "\n".join(needles.draw(rng, "uuids") for _ in range(40)),
  ]
  encode, bos = reference.tokenizer.encode, reference.tokenizer.bos
  rows = [encode(bos + text)[:512] for text in texts]
  nll = kvjax.negative_log_likelihood(
    reference.model, reference.params, kvjax.Prompts.of(rows)
  )
  names = ["keydiff", "compactor", "random"]
  keydiff, compactor, uniform = (
    candidate.plan.budget.retentions(np.asarray(nll), np.array([512, 512]))
    for candidate in candidates(names, [shipped])[1:]
  )
  # Prose, then UUIDs.
  assert keydiff[0] < 0.4
  assert keydiff[0] < compactor[0] < uniform[0]
  assert min(keydiff[1], compactor[1], uniform[1]) > 0.99
  assert keydiff[1] > 2 * keydiff[0]
  assert compactor[1] > compactor[0]


@pytest.mark.slow
def test_other_contexts_keep_their_quality(reference, shipped, tmp_path):
  """At what their calibration allows them, as tau = 0.95 asks."""
  texts = dataclasses.replace(ruler.Texts.read(), essay="train")
  samples = ruler.samples(
    [
      *("niah_single_1", "niah_single_2", "niah_single_3"),
      *("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
      "niah_multivalue",
    ],
    [1024],
    3,
    5,
    reference.tokenizer.count,
    texts,
  )
  store = Measurements(
    tmp_path / "held_out.jsonl", SETTINGS, Measurement, "measurement"
  )
  chosen = candidates(["keydiff", "compactor", "random"], [shipped])[1:]
  found = measuring.measure(
    reference, chosen, samples, store, 3, lambda task, new: None
  )
  for method in ("keydiff", "compactor", "random"):
    own = [m for m in found if m.method == method]
    assert np.mean([m.ratio for m in own]) >= 0.95, method
    prose, uuids = (
      [m.retention for m in own if m.task == task]
      for task in ("niah_single_2", "niah_multikey_3")
    )
    if method == "keydiff":
      assert np.mean(uuids) > 2 * np.mean(prose)
