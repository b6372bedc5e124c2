"""Runs made by hand: answers, their summary, and both on disk."""

import dataclasses
import os
import pathlib

import pytest

from kvjax.experiments.report import run_files
from kvjax.experiments.run import outputs
from kvjax.experiments.run.results import Answer, Results, Settings
from kvjax.experiments.run.summaries import summarize

SETTINGS = Settings(
  "tiny", "abc123", "float32", 7, "ruler", {"essay": "texts of Python"}
)


def make_answer(method="keydiff", budget="0.25", score=100.0, **fields):
  retention = 1.0 if method == "full" else fields.pop("retention", 0.25)
  tokens = fields.get("context_tokens", 800)
  return Answer(
    **{
      "task": "niah_single_1",
      "length": 1024,
      "sample": 0,
      "asked": str(fields.get("sample", 0)),
      "method": method,
      "options": f"{method.title()}()",
      "budget": "1" if method == "full" else budget,
      "retention": retention,
      "context_tokens": tokens,
      "kept_tokens": tokens * retention,
      "read_tokens": tokens * retention,
      "cache_bytes": round(1024 * tokens * retention),
      "host_bytes": 0,
      "question": "What is it?",
      "answer_prefix": " It is",
      "answers": ["1234567"],
      "prediction": " 1234567." if score else "nothing",
      "first_token": round(score),
      "depth": None,
      "turn": None,
      "scores": {"score": score},
    }
    | fields
  )


def make_record(answers, folder=None, **settings):
  """A run in memory, or on disk if a folder is given."""
  own = dataclasses.replace(SETTINGS, **settings)
  summary = dataclasses.asdict(own) | {
    "decoding": "greedy",
    "device": "CPU, 2 cores",
    "versions": {"python": "3.12.1", "jax": "1.2.3"},
    "seconds": {"total": 12.3},
    "rows": summarize(answers),
  }
  if folder is None:
    return run_files.Record(pathlib.Path("somewhere"), summary, answers)
  Results(folder, own).add(answers)
  outputs.write_json(folder / "summary.json", summary)
  return run_files.read(folder)


def let_age(record, seconds):
  """Makes a run on disk so much older than it is."""
  path = record.folder / "summary.json"
  time = path.stat().st_mtime - seconds
  os.utime(path, (time, time))


@pytest.fixture
def answer():
  return make_answer


@pytest.fixture
def record():
  return make_record


@pytest.fixture
def age():
  return let_age


@pytest.fixture(scope="session")
def crowd():
  """Twelve methods at three budgets, at one of them on RULER's 13 tasks."""
  tasks = [
    *(f"niah_single_{number}" for number in (1, 2, 3)),
    *(f"niah_multikey_{number}" for number in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
  ]
  methods = [f"method_{number}" for number in range(10)]
  methods += ["lagkv:lag=128", "protokv:score=attn_mean:prototypes=60"]
  answers = [
    make_answer(
      method,
      str(retention),
      score,
      task=task,
      sample=sample,
      retention=retention,
    )
    for method in methods
    for retention in (0.5, 0.25, 0.1)
    for task in (tasks if retention == 0.25 else tasks[-1:])
    for sample, score in enumerate((100.0, 0.0))
  ]
  full = [
    make_answer("full", task=task, sample=sample)
    for task in tasks
    for sample in (0, 1)
  ]
  return make_record([*full, *answers])
