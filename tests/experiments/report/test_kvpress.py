"""Folders that stand beside kvpress's: names, files and keys.

Names are as `evaluation/evaluate.py` of NVIDIA/kvpress puts them together.
"""

import ast
import csv
import io
import json

import pytest
import yaml
from odd_files import replace

from kvjax.experiments.report import kvpress

FILES = {"files": "data (sha256 abc)"}


def exported(record):
  return {folder.name: folder.files for folder in kvpress.folders(record)}


@pytest.mark.parametrize(
  ("settings", "fields", "name"),
  [
    (
      {"model": "Qwen/Qwen3-8B", "data": FILES},
      {},
      "ruler__1024__Qwen--Qwen3-8B__keydiff__0.75",
    ),
    # Published samples have the official name, ours have not.
    ({"data": FILES}, {"method": "full"}, "ruler__1024__tiny__no_press__0.00"),
    ({}, {"retention": 0.125}, "kvjax_ruler__1024__tiny__keydiff__0.88"),
    (
      {"protocol": "query-aware"},
      {"method": "a:b=1/2"},
      "kvjax_ruler__1024__tiny__a-b=1-2__0.75__whole_prompt",
    ),
    (
      {"protocol": "query-aware-kvpress", "data": FILES},
      {},
      "ruler__1024__tiny__keydiff__0.75__query_aware",
    ),
    (
      {"benchmark": "longbench", "data": FILES},
      {"task": "qasper"},
      "longbench__qasper__tiny__keydiff__0.75__max_context1024",
    ),
    (
      {"benchmark": "longbench", "data": FILES},
      {"task": "qasper_e_4-8k"},
      "longbench-e__qasper_e__tiny__keydiff__0.75__max_context1024",
    ),
    (
      {"benchmark": "needle"},
      {"depth": 1 / 9},
      "kvjax_needle__tiny__keydiff__0.75__max_context1024__needle_depth11",
    ),
    # What a threshold removes depends on the texts.
    (
      {"data": FILES},
      {"budget": "threshold -4, window 64", "method": "kvzap"},
      "ruler__1024__tiny__kvzap__-4.00",
    ),
    (
      {"data": FILES},
      {"budget": "threshold -inf", "method": "kvzap"},
      "ruler__1024__tiny__kvzap__0.75",
    ),
    # What reads less than it keeps removes nothing.
    (
      {},
      {"method": "quest", "kept_tokens": 800.0},
      "kvjax_ruler__1024__tiny__quest-reads-0.25__0.00",
    ),
  ],
)
def test_folders_are_named_as_kvpress_does(
  answer, record, settings, fields, name
):
  assert list(exported(record([answer(**fields)], **settings))) == [name]


def test_the_files_hold_what_kvpress_writes(answer, record):
  prediction = 'a "quoted", long\nanswer'
  answers = [
    answer(task=task, sample=sample, score=score, prediction=prediction)
    for task in ("vt", "cwe")
    for sample, score in enumerate((100.0, 0.0, 0.0))
  ]
  (files,) = exported(record(answers)).values()
  assert json.loads(files["metrics.json"]) == {
    "vt": {"string_match": 33.33},
    "cwe": {"string_match": 33.33},
  }
  lines = list(csv.DictReader(io.StringIO(files["predictions.csv"])))
  assert len(lines) == 6
  assert lines[0]["predicted_answer"] == prediction
  assert lines[0]["compression_ratio"] == "0.75"
  assert ast.literal_eval(lines[0]["answer"]) == ["1234567"]
  assert {line["task"] for line in lines} == {"vt", "cwe"}


def test_the_configuration_is_yaml_with_keys_of_its_own(answer, record):
  found = record([answer(method="é:😀")], schedule="blocks of 128")
  (files,) = exported(found).values()
  config = yaml.safe_load(files["config.yaml"])
  assert config == json.loads(files["config.yaml"])
  assert {
    name: config[name]
    for name in ("dataset", "data_dir", "press_name", "compression_ratio")
  } == {
    "dataset": "kvjax_ruler",
    "data_dir": "1024",
    "press_name": "é:😀",
    "compression_ratio": 0.75,
  }
  assert config["query_aware"] is False
  assert config["seed"] == 7
  assert config["kvjax"]["schedule"] == "blocks of 128"
  assert config["kvjax"]["samples"] == 1
  assert config["kvjax"]["data"] == {"essay": "texts of Python"}


def test_questions_that_are_compressed_are_in_the_context(answer, record):
  """So evaluate.py with `query_aware` leaves their column empty."""
  for protocol, query_aware in (
    ("query-aware-kvpress", True),
    ("query-aware", False),
    ("query-agnostic", False),
  ):
    (files,) = exported(record([answer()], protocol=protocol)).values()
    assert json.loads(files["config.yaml"])["query_aware"] is query_aware
    (line,) = predictions(files)
    assert (line["question"] == "") is query_aware


def predictions(files):
  return list(csv.DictReader(io.StringIO(files["predictions.csv"])))


def test_longbench_has_the_columns_that_kvpress_scores(answer, record):
  one = answer(
    task="trec", scored_by={"all_classes": ["City", "Date"], "words": 5210}
  )
  run = record([one], benchmark="longbench", data=FILES)
  (files,) = exported(run).values()
  assert json.loads(files["metrics.json"]) == 100
  (line,) = predictions(files)
  assert line["task"] == "trec"
  assert line["length"] == "5210"
  assert ast.literal_eval(line["answers"]) == ["1234567"]
  assert ast.literal_eval(line["all_classes"]) == ["City", "Date"]


def test_buckets_of_longbench_e_share_a_folder(answer, record):
  answers = [
    answer(task=f"trec_e_{bucket}", score=score, sample=0)
    for bucket, score in (("0-4k", 100.0), ("8k+", 0.0))
  ]
  run = record(answers, benchmark="longbench", data=FILES)
  (files,) = exported(run).values()
  assert json.loads(files["metrics.json"]) == {"0-4k": 100, "8k+": 0}
  assert {line["task"] for line in predictions(files)} == {"trec-e"}


def test_needles_have_the_needle_that_kvpress_scores(answer, record):
  needle = answer(
    depth=0.5,
    scores={"score": 100.0, "rouge_1": 25.0},
    scored_by={"needle": "It is 1234567."},
  )
  (files,) = exported(record([needle], benchmark="needle")).values()
  assert json.loads(files["metrics.json"]) == [
    {"rouge-1": {"f": 0.25}, "score": 1.0}
  ]
  (line,) = predictions(files)
  assert line["needle"] == "It is 1234567."


def test_taken_folders_are_numbered_and_own_ones_written_again(
  answer, record, tmp_path
):
  def place(**settings):
    (folder,) = kvpress.folders(record([answer()], **settings))
    return folder, folder.place(tmp_path)

  folder, first = place()
  assert first == tmp_path / folder.name
  first.mkdir()
  (first / "config.yaml").write_text("dataset: ruler\nseed: 42\n")
  folder, second = place()
  assert second == first / "1"
  second.mkdir()
  for name, text in folder.files.items():
    (second / name).write_text(text)
  assert place()[1] == second
  assert place(seed=8)[1] == first / "2"


@pytest.mark.parametrize("kind", ["a pipe", "zeros", "depth", "half", "digits"])
def test_folders_of_anything_are_taken(answer, record, tmp_path, kind):
  (folder,) = kvpress.folders(record([answer()]))
  first = tmp_path / folder.name
  first.mkdir()
  replace(first / "config.yaml", kind)
  assert folder.place(tmp_path) == first / "1"


def test_the_configuration_has_the_threshold(answer, record):
  for budget, threshold in (("threshold -4", -4.0), ("threshold -inf", None)):
    run = record([answer(budget=budget)])
    (files,) = exported(run).values()
    assert json.loads(files["config.yaml"])["threshold"] == threshold
