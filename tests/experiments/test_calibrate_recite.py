"""Calibrations by what caches recite: weights, measurements, records."""

import collections
import dataclasses
import json

import numpy as np
import pytest

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.calibration import (
  dry_run,
  fits,
  measuring,
  pictures,
  tables,
)
from kvjax.experiments.calibration.answers import TokenWeights
from kvjax.experiments.calibration.measuring import Measurement
from kvjax.experiments.run import comparison
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.run.results import Part, Settings
from kvjax.experiments.tasks.sample import Sample

SETTINGS = Settings("tiny", "abc", "float32", 0)
SENTENCE = " The grass is green and the sky is blue."
SHARES = (0.3, 0.6)
CHOSEN = candidates(["keydiff"], [kvjax.Retention(s) for s in SHARES])[1:]


def a_sample(number):
  return Sample(
    context=f"Number {number}." + SENTENCE * (2 + 2 * number) + "\n",
    question="What is green?",
    answer_prefix=" It is",
    answers=("the", "grass"),
    task="one",
    max_new_tokens=4,
    metadata={},
  )


SAMPLES = {Part("one", 128): [a_sample(number) for number in range(2)]}


def measured(lm, folder, weights):
  """All measurements, and how many of them were taken now."""
  store = measuring.stored(folder / "triples.jsonl", SETTINGS, weights)
  work = comparison.pending(lm, CHOSEN, SAMPLES, store, 2, apart=True)
  told = []
  measuring.measure(
    lm, work, store, lambda task, new: told.append(new), weights
  )
  keys = comparison.wanted(CHOSEN, SAMPLES)
  return [store.records[key] for key in keys], sum(told)


def test_weights_are_shares_of_tokens_that_are_in_answers(tiny):
  contexts, answers = collections.Counter(), collections.Counter()
  for sample in SAMPLES[Part("one", 128)]:
    before, _ = tiny.text.split_chat(sample.context)
    contexts.update(tiny.text.encode(before))
    answers.update(tiny.text.encode(" the, and grass"))
  both = sorted(set(contexts) & set(answers))
  expected = [(t, min(1, answers[t] / contexts[t])) for t in both]
  weights = TokenWeights.of(tiny, SAMPLES)
  assert [*weights.pairs] == expected
  assert 0 < min(w for _, w in expected) < 1
  others = TokenWeights(weights.pairs[1:])
  assert weights.digest != others.digest
  assert weights.digest == TokenWeights.of(tiny, SAMPLES).digest


def test_what_a_cache_recites_is_measured_with_the_rest(tiny, tmp_path):
  weights = TokenWeights.of(tiny, SAMPLES)
  found, new = measured(tiny, tmp_path, weights)
  assert new == len(found) == 4
  request = kvjax.RepeatRequest.of(tiny.text)
  for own in found:
    before, _ = tiny.text.split_chat(a_sample(own.sample).context)
    prompts = kvjax.Prompts.of(
      [tiny.text.encode(before)], repeat_request=request
    )
    plans = [
      kvjax.get_plan("full", 1.0),
      kvjax.get_plan("keydiff", kvjax.Retention(own.retention)),
    ]
    (full, cache), _ = kvjax.sweep(tiny.model, tiny.params, prompts, plans)
    expected = kvjax.recited(
      *(tiny.model, tiny.params, prompts, full, [cache]), dict(weights.pairs)
    )
    assert own.recited == pytest.approx(expected.item(), rel=1e-4)
    assert own.recited_by == weights.digest
  assert min(own.recited for own in found) < 0.999


def test_only_measurements_with_the_same_weights_are_kept(tiny, tmp_path):
  plain, new = measured(tiny, tmp_path, None)
  assert new == 4
  assert all(own.recited is None for own in plain)
  weights = TokenWeights.of(tiny, SAMPLES)
  for given, missing in (
    *((weights, 4), (weights, 0), (None, 0)),
    *((TokenWeights(()), 4), (weights, 4)),
  ):
    found, new = measured(tiny, tmp_path, given)
    assert new == missing
    assert all(own.recited is not None for own in found)
    np.testing.assert_allclose(
      [m.kept for m in found], [m.kept for m in plain], rtol=1e-5
    )
  # Files of older versions have neither field.
  path = tmp_path / "older" / "triples.jsonl"
  path.parent.mkdir()
  lines = (tmp_path / "triples.jsonl").read_text().splitlines()
  fields = [json.loads(line) for line in lines]
  for line in fields:
    del line["recited"], line["recited_by"]
  path.write_text("".join(json.dumps(line) + "\n" for line in fields))
  assert measured(tiny, path.parent, None)[1] == 0
  assert measured(tiny, path.parent, weights)[1] == 4


def test_recitals_count_in_what_is_said_to_take_time(tiny, tmp_path):
  store = measuring.stored(tmp_path / "t", SETTINGS)
  work = comparison.pending(tiny, CHOSEN, SAMPLES, store, 2, apart=True)
  plain, reciting = (
    dry_run._estimate(tiny, work, recites) for recites in (False, True)
  )
  assert reciting > 1.5 * plain
  weights = TokenWeights.of(tiny, SAMPLES)
  assert dry_run.foresee(tiny, [work], weights).measurements == 4


def test_contexts_that_are_too_long_to_recite_are_refused_at_once(tiny):
  long = dataclasses.replace(a_sample(0), context=SENTENCE * 30)
  samples = {Part("one", 512): [long]}
  measuring.check(tiny, CHOSEN, samples)
  with pytest.raises(InputError, match="with all of it recited, has"):
    measuring.check(tiny, CHOSEN, samples, TokenWeights(()))


def made(task, sample, share, need):
  """A context whose answer, and nearly as well its text, needs a retention."""
  kept = share >= need
  return Measurement(
    *(task, 128, sample, f"{task} {sample}", "keydiff", "", f"{share:g}"),
    retention=share,
    context_tokens=100,
    kept_tokens=100 * share,
    nll=1.0,
    tail_nll=1.0,
    concentration=None,
    skewness=None,
    kurtosis=None,
    full=0.0,
    kept=0.0 if kept else 3.0,
    recited=(0.9 if kept else 0.4) + 0.01 * (sample % 5),
    recited_by="abc",
  )


def measurements(first, count):
  return [
    made(task, sample, share, need)
    for task, needs in {"easy": (0.2, 0.3), "hard": (0.6, 0.9)}.items()
    for sample in range(first, first + count)
    for need in [needs[sample % 2]]
    # Not ascending: the order of measurements tells nothing.
    for share in (0.6, 0.3)
  ]


@pytest.fixture(scope="module")
def fitted():
  sets = fits.Sets(
    measurements(0, 4), measurements(10, 30), measurements(70, 6)
  )
  origin = fits.Origin("abc", "two tasks", 4)
  (found,) = fits.fit(CHOSEN, sets, "recite", origin, ((5, 0.5),))
  return found


def test_held_out_contexts_keep_what_they_recite(fitted):
  record = fitted.calibration
  assert (record.preset, record.grid) == ("recite", SHARES)
  assert record.token_weights == ((5, 0.5),)
  assert record.triples == 2 * 4 * 2
  reached, needed = fitted.reached_at(0.9), fitted.needed_at(0.9)
  assert [m.retention for m in reached] == [m.retention for m in needed]
  shares = {m.retention for m in reached}
  assert shares == {0.3, 0.6, 1.0}
  assert all(m.likelihood_ratio == 1 for m in reached)
  row = fitted.row(0.9)
  assert row["held_out"]["times"] == 1
  assert row["held_out"]["ratio"] == 1
  assert row["tasks"]["hard"]["kept"] == 0.8
  # No mean of 60 contexts can be higher than 60 / 61.
  assert {m.retention for m in fitted.reached_at(0.99)} == {1.0}


def test_tables_and_pictures_show_recitals(fitted):
  summary = {
    "rows": [fitted.row(0.9)],
    "tau": 0.9,
    "rule": "recite",
    **dict.fromkeys(("model", "heads", "dtype", "device", "trials"), "x"),
    **{"length": [128], "samples": 4, "held_out": 6, "seed": 4},
    "data": {},
    "versions": {},
    "benchmark": "ruler",
    "python": "3",
  }
  (overview, _, rules, *_) = tables.tables(summary)
  assert overview.header[:2] == ["method", "R2"]
  error = f"{fitted.calibration.error:.3f}"
  assert rules.lines[0][:3] == ["keydiff", tables.wording.NOTHING, error]
  report = tables.markdown(summary, [])
  assert "from which on all caches recite the context" in report
  (axes,) = pictures.ratio_curves([fitted], "title").axes
  for index, task in enumerate(("easy", "hard")):
    curve, _ = axes.get_lines()[2 * index : 2 * index + 2]
    x, y = curve.get_data()
    assert x.tolist() == [*SHARES]
    means = [
      np.mean(
        [
          m.recited
          for m in fitted.sets.triples
          if (m.task, m.retention) == (task, share)
        ]
      )
      for share in SHARES
    ]
    np.testing.assert_allclose(y, means)


def test_the_program_recites_and_evaluates_by_it(
  run_binary, tiny_directory, tmp_path
):
  model, folder = f"--model={tiny_directory}", tmp_path / "calibration"
  asked = [model, "--methods=keydiff", "--length=256", "--samples=2"]
  asked += ["--tasks=niah_single_1", "--batch=2", "--dtype=float32"]
  command = ["kvjax.experiments.calibrate", *asked, "--held_out=1"]
  command += ["--others=2", "--retention=0.3,0.6", "--rule=recite"]
  command += ["--tau=0.5", f"--output={folder}"]
  done = run_binary(*command)
  assert done.returncode == 0, done.stderr
  record = json.loads((folder / "records" / "keydiff.json").read_text())
  assert record["preset"] == "recite"
  assert record["grid"] == [0.3, 0.6]
  assert record["token_weights"]
  report = (folder / "calibration.md").read_text()
  assert "rule recite" in report
  # Cut off in a line, it goes on there and finds the same.
  path = folder / "held_out.jsonl"
  lines = path.read_bytes()
  path.write_bytes(lines[:-5])
  again = run_binary(*command)
  assert again.returncode == 0, again.stderr
  assert "1/1 in" in again.stderr
  resumed = json.loads((folder / "records" / "keydiff.json").read_text())
  assert resumed == record
  assert path.read_bytes().count(b"\n") == lines.count(b"\n")
  found = run_binary(
    "kvjax.experiments.evaluate",
    *(*asked, "--retention=auto", "--tau=0.4", "--seed=9"),
    f"--calibrations={folder / 'records'}",
    f"--output={tmp_path / 'evaluated'}",
  )
  assert found.returncode == 0, found.stderr
  (answers,) = (tmp_path / "evaluated").rglob("samples.jsonl")
  told = map(json.loads, answers.read_text().splitlines())
  kept = [a["retention"] for a in told if a["method"] == "keydiff"]
  assert len(kept) == 2
  assert {*kept} <= {0.3, 0.6, 1.0}
