"""Answers on disk: resumed, never doubled, never mixed; their means."""

import dataclasses
import functools
import importlib
import json
import pathlib
import resource

import pytest
from made_runs import make_answer

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.run import plugin_files, runner
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.run.model_digest import digest
from kvjax.experiments.run.prompting import QUERY_AGNOSTIC, QUERY_AWARE
from kvjax.experiments.run.results import Results, Settings
from kvjax.experiments.run.summaries import summarize
from kvjax.models import other_families

SETTINGS = Settings("tiny", "abc", "float32", 0)


def an_answer(sample=0, method="keydiff", score=100.0, **fields):
  own = {"budget": "0.5", "retention": 0.5, "context_tokens": 100}
  own |= {"kept_tokens": 50.0, "cache_bytes": 1000, "length": 320}
  own |= {"prediction": "1234567, “é”\n.", "sample": sample}
  return make_answer(method, score=score, **own | fields)


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
    (tmp_path / name).write_text(f'{{"name": "{name}"}}')
  first = digest(tmp_path)
  assert first == digest(tmp_path)
  for name in ("config.json", "tokenizer.json", "model.safetensors"):
    text = (tmp_path / name).read_text()
    (tmp_path / name).write_text(text.upper())
    assert digest(tmp_path) != first
    (tmp_path / name).write_text(text)


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


def test_a_digest_of_another_family_sees_its_files_and_code(
  tmp_path, monkeypatch
):
  # Above the model, a folder of this name says nothing of its files.
  model, code = tmp_path / "calibrations" / "model", tmp_path / "family_code.py"
  code.write_text("def load(directory, dtype, mesh): pass")
  monkeypatch.syspath_prepend(tmp_path)
  family = functools.partial(importlib.import_module("family_code").load)
  monkeypatch.setattr(other_families, "LOADS", {"of_others": family})
  model.mkdir(parents=True)
  (model / "config.json").write_text('{"model_type": "of_others"}')
  (model / "weights.npz").write_text("weights")
  first = digest(model)
  for unread in ("calibrations", "results", "__pycache__", ".cache"):
    (model / unread).mkdir()
    (model / unread / "file").write_text("any")
  assert digest(model) == first
  (model / "weights.npz").write_text("others!")
  assert digest(model) != first
  (model / "weights.npz").write_text("weights")
  code.write_text("def load(directory, dtype, mesh): return 1, 2")
  plugin_files.files_of.cache_clear()
  assert digest(model) != first


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


def test_tables_have_all_targets_and_the_last_calibration_of_each(tmp_path):
  def automatic(method, tau, rule):
    options = f"{method}, kc = {rule}"
    return an_answer(method=method, budget=f"auto at {tau}", options=options)

  def rows(*new):
    store.add(new)
    found = runner._sort_answers(store, [answer.key for answer in new])
    return [(a.method, a.budget, a.options[-1]) for a in found]

  store = Results(tmp_path, SETTINGS)
  snapkv = automatic("snapkv", 0.9, 1)
  store.add([automatic("keydiff", 0.9, 1), snapkv])
  others = [("keydiff", "auto at 0.9", "1"), ("snapkv", "auto at 0.9", "1")]
  assert rows(automatic("keydiff", 0.5, 1)) == [
    ("keydiff", "auto at 0.5", "1"),
    *others,
  ]
  assert rows(automatic("keydiff", 0.9, 2)) == [
    ("keydiff", "auto at 0.9", "2"),
    others[1],
    ("keydiff", "auto at 0.5", "1"),
  ]


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
