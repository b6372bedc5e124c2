"""Answers on disk: resumed, never doubled, never mixed; their means."""

import dataclasses
import json
import pathlib

import pytest

from experiments.results import (
  Answer,
  Results,
  Settings,
  digest,
  summarize,
)
from kvjax.errors import InputError

SETTINGS = Settings("tiny", "abc", "float32", 320, 0)


def an_answer(sample=0, method="keydiff", score=100.0, **fields):
  return Answer(
    **{
      "task": "niah_single_2",
      "sample": sample,
      "method": method,
      "options": f"{method}()",
      "budget": "0.5",
      "retention": 0.5,
      "context_tokens": 100,
      "kept_tokens": 50.0,
      "read_tokens": 50.0,
      "cache_bytes": 1000,
      "host_bytes": 0,
      "answers": ["1234567"],
      "prediction": "1234567, “é”\n.",
      "score": score,
    }
    | fields
  )


def lines(folder):
  return (folder / "samples.jsonl").read_text().splitlines()


def test_answers_come_back_as_they_were(tmp_path):
  written = [an_answer(sample) for sample in range(3)]
  results = Results(tmp_path / "new" / "run", SETTINGS)
  assert not (tmp_path / "new").exists()
  results.add(written[:2])
  results.add(written[2:])
  again = Results(results.folder, SETTINGS)
  assert list(again.answers.values()) == written
  assert list(again.answers) == [answer.key for answer in written]
  fields = json.loads(lines(results.folder)[0])
  assert fields == dataclasses.asdict(SETTINGS) | dataclasses.asdict(written[0])


def test_an_unfinished_line_is_dropped_and_written_anew(tmp_path):
  results = Results(tmp_path, SETTINGS)
  results.add([an_answer(0), an_answer(1)])
  path = tmp_path / "samples.jsonl"
  whole = path.read_bytes()
  for cut in (1, 30, len(whole) // 2 - 1):
    path.write_bytes(whole[:-cut])
    again = Results(tmp_path, SETTINGS)
    assert [key.sample for key in again.answers] == [0]
    again.add([an_answer(1)])
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("model", "other"),
    ("weights", "def"),
    ("dtype", "bfloat16"),
    ("length", 640),
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
  with pytest.raises(InputError, match=r"Line 2 of .* is not an answer"):
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


def test_a_summary_has_the_means_of_every_method_budget_and_task():
  rows = summarize(
    [
      an_answer(0, score=100.0, kept_tokens=50.0, cache_bytes=1000),
      an_answer(1, score=0.0, kept_tokens=51.0, cache_bytes=1001),
      an_answer(2, score=0.0, kept_tokens=50.0, cache_bytes=1000),
      an_answer(0, "snapkv"),
      an_answer(0, "snapkv", budget="64 tokens", retention=0.64),
      an_answer(1, "snapkv", budget="64 tokens", retention=0.5),
    ]
  )
  assert rows[0] == {
    "method": "keydiff",
    "retention": 0.5,
    "budget": "0.5",
    "task": "niah_single_2",
    "score": 33.33,
    "samples": 3,
    "context_tokens": 100.0,
    "kept_tokens": 50.33,
    "read_tokens": 50.0,
    "cache_bytes": 1000,
    "host_bytes": 0,
  }
  assert [row["budget"] for row in rows[1:]] == ["0.5", "64 tokens"]
  assert rows[2]["retention"] == 0.57
  assert rows[2]["samples"] == 2


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
