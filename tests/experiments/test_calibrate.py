"""Calibrating: triples on disk, records found, contexts that set budgets."""

import math

import numpy as np
import pytest
from comparing import compare

import kvjax
from kvjax.calibration.curve import least_retention
from kvjax.calibration.features import OF_SCORES
from kvjax.errors import InputError
from kvjax.experiments.calibration import dry_run, measuring
from kvjax.experiments.calibration.measuring import Measurement, Measurements
from kvjax.experiments.calibration.record_files import Auto, file_name
from kvjax.experiments.run import comparison
from kvjax.experiments.run.candidates import candidates, parse_budgets
from kvjax.experiments.run.results import Part, Results, Settings
from kvjax.experiments.tasks.sample import Sample
from kvjax.options.schedules import WHOLE

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
    kvjax.get_plan(name, kvjax.Retention(0.5)).label,
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


@pytest.mark.slow
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
  compare(tiny, chosen, PAIR, results, 2, lambda task, new: None)
  found = {(a.sample, a.budget): a for a in results.records.values()}
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


@pytest.mark.parametrize(
  ("name", "seeds"),
  [
    ("random", (3, 3)),
    ("compactor", (3, 3)),
    ("magicpig", (3, 3)),
    ("random:seed=5", (5, 5)),
    ("keydiff", (None, None)),
  ],
)
def test_a_seed_reaches_what_is_random(name, seeds, tmp_path):
  def seed(candidate):
    plan = candidate.plan
    drawn = plan.method if plan.sparse is None else plan.sparse.retrieval
    return getattr(drawn, "seed", None)

  budgets = [kvjax.Retention(0.5), kvjax.Retention(0.25)]
  assert tuple(map(seed, candidates([name], budgets, seed=3)[1:])) == seeds
  assert candidates([name], budgets, seed=0) == candidates([name], budgets)


def test_a_calibration_holds_for_all_seeds(tmp_path):
  auto = automatic(tmp_path, a_record("compactor"))
  plan = candidates(["compactor"], [auto], seed=3)[1].plan
  assert plan.method.seed == 3
  assert (
    plan.budget.calibration.alpha
    == auto.records[
      kvjax.get_plan("compactor", kvjax.Retention(1.0)).label, False
    ].alpha
  )


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
  assert "make one with kvjax calibrate --methods=snapkv," in sentence
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


def test_two_records_of_a_method_are_refused_unless_they_are_equal(tmp_path):
  one, other = a_record("keydiff"), a_record("keydiff", beta=-4.0)
  equal = automatic(tmp_path / "equal", one, one)
  assert list(equal.records.values()) == [one]
  heads = a_record("keydiff", per_query_head=True)
  both = automatic(tmp_path / "heads", one, heads)
  assert list(both.records.values()) == [one, heads]
  with pytest.raises(InputError, match=r"0\.json and .*1\.json are different"):
    automatic(tmp_path / "different", one, other)


def test_auto_stands_beside_numbers(tmp_path):
  auto = automatic(tmp_path)
  half = kvjax.Retention(0.5)
  assert parse_budgets(["auto ", "0.5"], None, auto) == [auto, half]
  with pytest.raises(InputError, match=r"takes numbers .* 'auto' is not one"):
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
  work = comparison.pending(lm, chosen, SAMPLES, store, 2, apart=True)
  measuring.measure(lm, work, store, on_new)
  return [store.records[key] for key in comparison.wanted(chosen, SAMPLES)]


def test_tokens_of_a_hybrid_are_those_of_the_layers_that_budgets_are_of(
  hybrid, tmp_path
):
  for own in measured(hybrid, tmp_path):
    assert own.kept_tokens == math.ceil(own.retention * own.context_tokens)


@pytest.mark.slow
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
  assert own.nll_ratio == pytest.approx(expected)
  expected = min(math.exp(own.full - own.kept), 1)
  assert own.likelihood_ratio == pytest.approx(expected)
  swept = kvjax.measured_sweep(tiny.model, tiny.params, context, [plan])
  (features,) = swept.features
  assert own.tail_nll == pytest.approx(features.tail_nll[0], rel=1e-4)
  for name in OF_SCORES:
    expected = getattr(features, name)[0]
    assert getattr(own, name) == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
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


def test_a_dry_run_counts_what_is_then_measured(tiny, tmp_path, capsys, caplog):
  chosen = candidates(METHODS, [kvjax.Retention(0.5)])[1:]
  store = Measurements(tmp_path / "t", SETTINGS, Measurement, "measurement")
  work = comparison.pending(tiny, chosen, SAMPLES, store, 2, apart=True)
  found = dry_run.foresee(tiny, [work])
  assert not list(tmp_path.iterdir())
  assert found.contexts == 3
  assert found.pace.first > found.pace.again > 0
  assert found.pace.again <= found.pace.total < 10 * found.pace.first
  dry_run.announce(tiny, [work])
  announced = capsys.readouterr().err
  assert announced.startswith(f"{found._replace(pace=None)} Expect about ")
  with caplog.at_level("INFO", "absl"):
    measuring.measure(tiny, work, store, lambda task, new: None)
  made = list(store.records.values())
  for one in work.batches:
    size = f"{len(one[1])} contexts of up to {one[0].context} tokens"
    assert f"Measured {size} with 2 caches in" in caplog.text
  assert found.measurements == len(made)
  assert found.tokens == sum(one.context_tokens for one in made) / len(chosen)
  assert "3 contexts of" in str(found)
  left = comparison.pending(tiny, chosen, SAMPLES, store, 2, apart=True)
  nothing = dry_run.foresee(tiny, [left])
  dry_run.announce(tiny, [left])
  assert not capsys.readouterr().err
  assert str(nothing) == "0 contexts of 0 tokens in all, 0 measurements."


def test_a_method_that_keeps_all_teaches_nothing(tiny):
  chosen = candidates(["keydiff", "lagkv"], [kvjax.Retention(0.2)])[1:]
  with pytest.raises(InputError, match="has lagkv, which keeps all of"):
    measuring.check(tiny, chosen, SAMPLES)
