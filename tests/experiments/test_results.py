"""Answers on disk: resumed, never doubled, never mixed; their means."""

import dataclasses
import json
import pathlib
import resource

import numpy as np
import pytest
import scipy.stats
from made_runs import make_answer

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.run import runner
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.run.intervals import (
  count_samples,
  difference,
  interval,
  of_ratio,
  of_scores,
)
from kvjax.experiments.run.prompting import QUERY_AGNOSTIC, QUERY_AWARE
from kvjax.experiments.run.results import Results, Settings, digest
from kvjax.experiments.run.summaries import summarize

SETTINGS = Settings("tiny", "abc", "float32", 0)


def an_answer(sample=0, method="keydiff", score=100.0, **fields):
  own = {"budget": "0.5", "retention": 0.5, "context_tokens": 100}
  own |= {"kept_tokens": 50.0, "cache_bytes": 1000, "length": 320}
  own |= {"prediction": "1234567, “é”\n.", "sample": sample}
  return make_answer(method, score=score, **own | fields)


def scored(scores, **fields):
  """Samples with these scores."""
  return [
    an_answer(number, score=float(score), **fields)
    for number, score in enumerate(scores)
  ]


def lines(folder):
  return (folder / "samples.jsonl").read_text().splitlines()


def test_answers_come_back_as_they_were(tmp_path):
  written = [an_answer(sample) for sample in range(3)]
  results = Results(tmp_path / "new" / "run", SETTINGS)
  assert not (tmp_path / "new").exists()
  results.add(written[:2])
  results.add(written[2:])
  again = Results((tmp_path / "new" / "run"), SETTINGS)
  assert list(again.records.values()) == written
  assert list(again.records) == [answer.key for answer in written]
  fields = json.loads(lines(tmp_path / "new" / "run")[0])
  assert fields == dataclasses.asdict(SETTINGS) | dataclasses.asdict(written[0])


def test_an_unfinished_line_is_dropped_and_written_anew(tmp_path):
  results = Results(tmp_path, SETTINGS)
  results.add([an_answer(0), an_answer(1)])
  path = tmp_path / "samples.jsonl"
  whole = path.read_bytes()
  for cut in (1, 30, len(whole) // 2 - 1):
    path.write_bytes(whole[:-cut])
    again = Results(tmp_path, SETTINGS)
    assert [key.asked for key in again.records] == ["0"]
    again.add([an_answer(1)])
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("model", "other"),
    ("weights", "def"),
    ("dtype", "bfloat16"),
    ("benchmark", "ruler"),
    ("seed", 1),
    ("protocol", "query-aware"),
  ],
)
def test_answers_of_other_settings_are_refused(tmp_path, field, value):
  Results(tmp_path, SETTINGS).add([an_answer()])
  other = dataclasses.replace(SETTINGS, **{field: value})
  with pytest.raises(InputError, match=f"{field} {value}; remove it or choose"):
    Results(tmp_path, other)


@pytest.mark.parametrize("line", ["nonsense", "[]", "1", '{"task": "t"}', ""])
def test_lines_that_are_no_answers_are_refused(tmp_path, line):
  Results(tmp_path, SETTINGS).add([an_answer()])
  with (tmp_path / "samples.jsonl").open("a") as file:
    file.write(f"{line}\n")
  with pytest.raises(InputError, match=r"Line 2 of .* is no answer"):
    Results(tmp_path, SETTINGS)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(InputError, match=r"cannot be written: .*file is no fold"):
    Results(tmp_path / "file" / "run", SETTINGS)
  with pytest.raises(InputError, match="cannot be written"):
    Results(pathlib.Path("/proc/nothing/run"), SETTINGS)


def test_a_digest_tells_models_apart(tmp_path):
  for name in ("config.json", "tokenizer.json", "model.safetensors"):
    (tmp_path / name).write_text(name)
  first = digest(tmp_path)
  assert first == digest(tmp_path)
  for name in ("config.json", "tokenizer.json", "model.safetensors"):
    (tmp_path / name).write_text(name.upper())
    assert digest(tmp_path) != first
    (tmp_path / name).write_text(name)


def test_a_digest_sees_the_files_of_a_checkpoint(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  path = tmp_path / "model.orbax" / "state" / "d" / "0123"
  path.parent.mkdir(parents=True)
  path.write_text("weights")
  first = digest(tmp_path)
  path.write_text("others!")
  second = digest(tmp_path)
  assert second != first
  # Beside safetensors it is not what is loaded.
  (tmp_path / "model.safetensors").write_text("weights")
  before = digest(tmp_path)
  path.unlink()
  assert digest(tmp_path) == before


def test_a_digest_of_a_gguf_file_is_that_of_its_folder(tmp_path):
  path = tmp_path / "model.gguf"
  path.write_text("GGUF")
  first = digest(path)
  assert digest(tmp_path) == first
  path.write_text("other")
  assert digest(path) != first
  # Beside a Hugging Face model it is not what is loaded.
  (tmp_path / "config.json").write_text("{}")
  before = digest(tmp_path)
  path.unlink()
  assert digest(tmp_path) == before


def test_a_summary_has_the_means_of_every_method_budget_and_task():
  rows = summarize(
    [
      an_answer(0, score=100.0, kept_tokens=50.0, cache_bytes=1000),
      an_answer(1, score=0.0, kept_tokens=51.0, cache_bytes=1001),
      an_answer(2, score=0.0, kept_tokens=50.0, cache_bytes=1000),
      an_answer(0, "snapkv"),
      an_answer(0, "snapkv", budget="64 tokens", retention=0.64),
      an_answer(1, "snapkv", budget="64 tokens", retention=0.5),
      an_answer(0, depth=0.5),
      an_answer(0, length=640),
      an_answer(0, turn=1, scores={"score": 100.0, "partial": 25.0}),
    ]
  )
  (low, high) = rows[0].pop("interval")
  # Three samples, of which one is right: 8 of 27 draws have none, 1 has all.
  assert (low, high) == (0, 100)
  assert rows[0] == {
    "method": "keydiff",
    "options": "Keydiff()",
    "retention": 0.5,
    "budget": "0.5",
    "task": "niah_single_1",
    "length": 320,
    "depth": None,
    "turn": None,
    "score": 33.33,
    "scores": {},
    "samples": 3,
    "context_tokens": 100.0,
    "kept_tokens": 50.33,
    "read_tokens": 50.0,
    "cache_bytes": 1000,
    "host_bytes": 0,
  }
  assert [row["budget"] for row in rows[1:3]] == ["0.5", "64 tokens"]
  assert rows[2]["retention"] == 0.57
  assert rows[2]["samples"] == 2
  places = [(row["depth"], row["length"], row["turn"]) for row in rows[3:6]]
  assert places == [(0.5, 320, None), (None, 640, None), (None, 320, 1)]
  assert rows[5]["scores"] == {"partial": 25.0}


def test_first_tokens_are_compared_with_the_full_cache():
  answers = [
    an_answer(0, "full", first_token=1),
    an_answer(1, "full", first_token=2),
    an_answer(0, first_token=1),
    an_answer(1, first_token=None),
  ]
  rows = summarize(answers)
  assert [r["scores"] for r in rows] == [
    {"same_first_token": 100.0},
    {"same_first_token": 50.0},
  ]
  assert summarize(answers[2:])[0]["scores"] == {}
  (row, _) = summarize(answers, first_token_from_full_prompt=True)
  assert row["scores"] == {}


def test_first_tokens_come_from_whole_prompts_that_hold_the_question():
  blocks = kvjax.Schedule(block=8)
  for protocol, schedule, expected in (
    (QUERY_AWARE, kvjax.Schedule(every=1), True),
    (QUERY_AWARE, blocks, False),
    (QUERY_AGNOSTIC, kvjax.Schedule(), False),
  ):
    chosen = candidates(["streaming"], [kvjax.Tokens(8)], schedule)
    assert runner.first_token_from_full_prompt(protocol, chosen) == expected


def test_scores_that_older_answers_are_without_are_left_out():
  scores = {"score": 100.0, "partial": 50.0}
  new = an_answer(0, scores=scores | {"first_key_token": 100.0})
  old = an_answer(1, scores=scores)
  for answers in ([new, old], [old, new]):
    assert summarize(answers)[0]["scores"] == {"partial": 50.0}
  (row,) = summarize([new])
  assert row["scores"] == {"partial": 50.0, "first_key_token": 100.0}


def test_the_interval_of_a_mean_is_that_of_the_normal_for_many_samples():
  """Of R samples with deviation s: 1.96 s / sqrt(R) to either side."""
  scores = np.random.default_rng(3).normal(50, 10, 400)
  low, high = interval(scored(scores))
  assert low < scores.mean() < high
  np.testing.assert_allclose(high - low, 2 * 1.96 * scores.std() / 20, rtol=0.1)


def test_the_interval_of_scores_is_that_of_answers_with_these_scores():
  """If tasks have as many samples, for they then weigh the same."""
  scores = {"a": [70.0, 90.0, 20.0, 40.0], "b": [50.0, 55.0, 60.0, 45.0]}
  answers = [
    answer for task in scores for answer in scored(scores[task], task=task)
  ]
  assert of_scores(scores) == pytest.approx(interval(answers))
  low, high = of_scores({"a": [100.0] * 30, "b": [0.0] * 10})
  assert low < 75 < high


def test_the_interval_of_a_ratio_is_that_of_scipy():
  rng = np.random.default_rng(4)
  least = rng.uniform(0.2, 0.9, 60)
  kept = np.minimum(1.0, least + rng.uniform(0, 0.4, 60))
  found = of_ratio({"a": list(zip(kept, least, strict=True))})
  expected = scipy.stats.bootstrap(
    (kept, least),
    lambda kept, least, axis: kept.mean(axis) / least.mean(axis),
    paired=True,
    method="percentile",
    rng=np.random.default_rng(1),
  ).confidence_interval
  np.testing.assert_allclose(found, expected, atol=0.1 * np.ptp(expected))
  # Tasks that differ are resampled apart, so that their difference is none.
  apart = of_ratio({"a": [(1.0, 1.0)] * 5, "b": [(3.0, 1.0)] * 5})
  assert apart == pytest.approx((2.0, 2.0))


def test_what_was_drawn_together_is_resampled_together():
  """Turns and lengths that all say the same tell no more than one does."""
  scores = [100.0, 0.0, 0.0, 100.0, 100.0]
  expected = interval(scored(scores))
  turns = [
    an_answer(8 * number + turn, score=score, turn=turn)
    for number, score in enumerate(scores)
    for turn in range(8)
  ]
  assert interval(turns) == pytest.approx(expected)
  lengths = scored(scores, length=320) + scored(scores, length=640)
  assert interval(lengths) == pytest.approx(expected)
  low, high = interval(scored(scores * 8))
  assert high - low < (expected[1] - expected[0]) / 2


@pytest.mark.parametrize(
  ("answered", "right", "trials"),
  [
    ({"a": [100.0] * 20}, 20, 20),
    ({"a": [0.0] * 7}, 0, 7),
    ({"a": [50.0] * 6}, 3, 6),
    ({"a": [100.0]}, 1, 1),
    ({"a": [100.0] * 4, "b": [0.0] * 4}, 4, 8),
    # The variance of the mean is that of 2 * 2 / (1 + 1/3) = 3 answers.
    ({"a": [100.0], "b": [100.0] * 3}, 3, 3),
    # A single answer tells nothing of how its task varies.
    ({"a": [100.0], "b": [0.0, 0.0, 100.0]}, 2, 3),
  ],
)
def test_where_resampling_tells_nothing_the_interval_is_wilsons(
  answered, right, trials
):
  answers = [
    answer
    for task, scores in answered.items()
    for answer in scored(scores, task=task)
  ]
  expected = scipy.stats.binomtest(right, trials).proportion_ci(method="wilson")
  assert interval(answers) == pytest.approx([100 * b for b in expected])


def test_a_difference_is_paired_by_sample():
  """What varies between samples, but not between methods, does not count."""
  rng = np.random.default_rng(5)
  scores = rng.uniform(20, 80, 40)
  better = scored(scores + rng.uniform(2, 8, 40), method="tova")
  low, high = difference(better, scored(scores))
  assert 0 < low < 5 < high < 7
  assert np.ptp(interval(better)) > 5 * (high - low)
  # Samples that only one of them answered do not count.
  more = [*scored(scores), an_answer(99, score=0.0)]
  assert difference(better, more) == pytest.approx((low, high))
  flipped = difference(scored(scores), better)
  assert flipped == pytest.approx((-high, -low), abs=0.2)


@pytest.mark.parametrize(
  ("wins", "losses", "of", "decided"),
  [
    (1, 0, 1, False),
    (4, 0, 8, False),
    (8, 0, 8, True),
    (2, 0, 30, False),
    (9, 0, 30, True),
    (9, 6, 30, False),
    (0, 0, 500, False),
  ],
)
def test_few_samples_show_no_difference(wins, losses, of, decided):
  scores = [100.0] * wins + [0.0] * (of - wins)
  others = [0.0] * (of - losses) + [100.0] * losses
  low, high = difference(scored(scores), scored(others))
  assert (low > 0) == decided
  assert -100 <= low <= 100 * (wins - losses) / of <= high + 1e-9


def test_tasks_have_the_weights_of_the_average():
  answers = [
    *scored([0.0] * 20, task="a"),
    *scored(np.linspace(0, 100, 20), task="b"),
  ]
  alone = interval([answer for answer in answers if answer.task == "b"])
  low, high = interval(answers, {"a": 0.75, "b": 0.25})
  np.testing.assert_allclose((low, high), np.array(alone) / 4, atol=1)
  assert count_samples(answers) == 40
  turns = [an_answer(turn, turn=turn) for turn in range(8)]
  assert count_samples(turns) == 1


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path):
  (tmp_path / "samples.jsonl").mkdir()
  with pytest.raises(InputError, match=r"samples\.jsonl cannot be written"):
    Results(tmp_path, SETTINGS)


def test_the_digest_sees_late_weights(tmp_path):
  path = tmp_path / "model.safetensors"
  content = bytearray(3 * 2**20)
  path.write_bytes(content)
  before = digest(tmp_path)
  content[-7] = 1
  path.write_bytes(content)
  assert digest(tmp_path) != before


def test_a_full_disk_loses_nothing(tmp_path):
  """A file that may not grow stands for a disk that is full."""
  results = Results(tmp_path, SETTINGS)
  results.add([an_answer(0)])
  path = tmp_path / "samples.jsonl"
  whole = path.read_bytes()
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 30, limits[1]))
  try:
    with pytest.raises(InputError, match="File too large; what it holds is ke"):
      results.add([an_answer(1)])
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert len(path.read_bytes()) > len(whole)
  for again in (results, Results(tmp_path, SETTINGS)):
    assert list(again.records) == [an_answer(0).key]
  results.add([an_answer(1)])
  assert path.read_bytes().startswith(whole)
  assert len(lines(tmp_path)) == 2


def test_answers_of_older_runs_lack_what_metrics_read(tmp_path):
  Results(tmp_path, SETTINGS).add([an_answer()])
  path = tmp_path / "samples.jsonl"
  fields = json.loads(path.read_text())
  assert fields.pop("scored_by") == {}
  path.write_text(json.dumps(fields) + "\n")
  (answer,) = Results(tmp_path, SETTINGS).records.values()
  assert answer == an_answer()
