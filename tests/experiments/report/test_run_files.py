"""Runs read back from disk; what no run has written is refused."""

import json

import pytest

from kvjax.errors import InputError
from kvjax.experiments.report import run_files


def test_runs_are_found_below_and_read_once(answer, record, tmp_path):
  written = [
    record([answer(score=score)], tmp_path / name, seed=seed)
    for seed, (name, score) in enumerate([("a", 1.0), ("b/c", 2.0)])
  ]
  (tmp_path / "unfinished").mkdir()
  (tmp_path / "unfinished" / "samples.jsonl").write_text("")
  (tmp_path / "other").mkdir()
  (tmp_path / "other" / "summary.json").write_text("{}")
  assert run_files.find([tmp_path, tmp_path / "a"]) == written
  left_out = run_files.unfinished([tmp_path, tmp_path / "unfinished"])
  assert [path.name for path in left_out] == ["unfinished"]


def test_only_answers_that_the_rows_are_means_of_are_read(
  answer, record, tmp_path
):
  kept = [answer(sample=number, score=50.0) for number in (0, 1)]
  others = [answer(sample=2), answer("snapkv"), answer(budget="0.5")]
  folder = record([*kept, *others], tmp_path).folder
  rows = record(kept).summary["rows"]
  path = folder / "summary.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": rows}))
  with (folder / "samples.jsonl").open("a") as file:
    file.write('{"unfinished": ')
  assert run_files.read(folder).answers == kept


@pytest.mark.parametrize(
  ("change", "fault"),
  [
    (lambda s: "nonsense", "Expecting value"),
    (lambda s: json.dumps([]), "is no object"),
    (lambda s: s.replace('"seed"', '"sead"'), "'seed' is missing"),
    (lambda s: s.replace('"options"', '"option"'), "'options' is missing"),
    (lambda s: s.replace('"score": 100.0', '"score": NaN'), "'score' is nan"),
    (lambda s: s.replace('"score": 100.0', '"score": "1"'), "'score' is '1'"),
    (lambda s: s.replace('"samples": 1', '"samples": 0'), "cannot be"),
    (lambda s: json.dumps(json.loads(s) | {"rows": []}), "no rows"),
    (lambda s: json.dumps(json.loads(s) | {"rows": [1]}), "1 is no object"),
  ],
)
def test_a_malformed_summary_is_named(answer, record, tmp_path, change, fault):
  path = record([answer()], tmp_path).folder / "summary.json"
  path.write_text(change(path.read_text()))
  with pytest.raises(InputError, match=rf"{path} is not a run's .*{fault}"):
    run_files.find([tmp_path])


def test_lines_that_are_no_answers_are_named(answer, record, tmp_path):
  path = record([answer()], tmp_path).folder / "samples.jsonl"
  with path.open("a") as file:
    file.write('{"task": "a"}\n')
  with pytest.raises(InputError, match=rf"Line 2 of {path} is no answer"):
    run_files.read(tmp_path)


def test_a_folder_without_runs_is_refused(tmp_path):
  for folder in (tmp_path, tmp_path / "missing"):
    with pytest.raises(InputError, match=rf"{folder} holds no run"):
      run_files.find([folder])


def test_the_only_run_of_a_folder_is_no_other(tmp_path, answer, record):
  one = record([answer()], tmp_path / "ruler__one")
  assert run_files.find_one(tmp_path).folder == one.folder
  record([answer()], tmp_path / "ruler__two", seed=8)
  with pytest.raises(InputError, match="differ: ruler__one, ruler__two; choo"):
    run_files.find_one(tmp_path)


def test_notes_are_those_of_a_whole_summary(answer, record, tmp_path):
  assert run_files.notes(tmp_path / "none") == {}
  path = record([answer()], tmp_path).folder / "summary.json"
  assert run_files.notes(tmp_path) == {}
  content = json.loads(path.read_text())
  path.write_text(json.dumps(content | {"about": {"length": "900 tokens"}}))
  assert run_files.notes(tmp_path) == {"length": "900 tokens"}
  path.write_text('{"about": {"length": "900 tokens"}}')
  assert run_files.notes(tmp_path) == {}
