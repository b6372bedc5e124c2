"""Runs made by hand: answers, their summary, and both on disk."""

import dataclasses
import os
import pathlib

from kvjax.experiments.report import run_files
from kvjax.experiments.run import outputs
from kvjax.experiments.run.results import Answer, Results, Settings
from kvjax.experiments.run.summaries import summarize

SETTINGS = Settings(
  "tiny", "abc123", "float32", 7, "ruler", {"essay": "texts of Python"}
)

# Of a reply whose numbers do not matter.
MEASURED = {
  **dict(retention=0.5, context_tokens=9, kept_tokens=1.0, read_tokens=1.0),
  **dict(cache_bytes=1, host_bytes=0),
}


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
