"""Exports results in the layout of NVIDIA/kvpress's `evaluation/evaluate.py`.

There is one folder per dataset, model, method and share removed, with three
files of the same names and keys: `predictions.csv`, `metrics.json` and
`config.yaml`, which is JSON and thereby YAML. Fields that kvpress does not have
are in the last one under `kvjax`. The predictions have the columns that
kvpress's scorers read. A benchmark has its official name only if its samples
are published ones; those made here are `kvjax_ruler` and so on.
"""

import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvjax import files
from kvjax.experiments.benchmarks.kvpress_layout import KvpressLayout
from kvjax.experiments.benchmarks.registry import presentation
from kvjax.experiments.report import formats
from kvjax.experiments.report.means import Mean, Summary, evictable, means
from kvjax.experiments.report.rows import SETTINGS, settings_of
from kvjax.experiments.report.run_files import Record
from kvjax.experiments.run.candidates import FULL
from kvjax.experiments.run.prompting import QUERY_AWARE, QUERY_AWARE_KVPRESS
from kvjax.experiments.run.results import Answer

_CONFIG = "config.yaml"
# The fields under `kvjax` that distinguish results of one folder name.
_OWN = ("method", "options", "budget", *SETTINGS[2:])


class Folder(NamedTuple):
  """Results of a method at a budget.

  Attributes:
    name: name of the folder in kvpress's scheme.
    files: contents of the files by name.
  """

  name: str
  files: Mapping[str, str]

  def place(self, root: pathlib.Path) -> pathlib.Path:
    """Returns its path; kvpress adds numbered subfolders to an existing one.

    A folder with the same run's results is reused.
    """
    identity = _identity(self.files[_CONFIG])
    place, number = root / self.name, 0
    while place.exists() and _identity_of(place) != identity:
      number += 1
      place = root / self.name / str(number)
    return place


def folders(record: Record) -> Iterator[Folder]:
  """Yields all folders of a run."""
  for part in _parts(record):
    for mean in means(part.summary["rows"]):
      yield _folder(part.at(method=mean.method, budget=mean.budget), mean)


def _parts(record: Record) -> Iterator[Record]:
  """Yields the parts of a run that have folders of their own."""
  layout = presentation(record.summary["benchmark"]).kvpress
  apart = dict.fromkeys(
    tuple(row[name] for name in layout.apart) for row in record.summary["rows"]
  )
  for values in apart:
    part = record.at(**dict(zip(layout.apart, values, strict=True)))
    yield from map(part.of_tasks, layout.groups(part.values("task")))


def _folder(own: Record, mean: Mean) -> Folder:
  summary = own.summary
  layout = presentation(summary["benchmark"]).kvpress
  config = _config(layout, summary, mean)
  share = config["compression_ratio"]
  parts = [
    config["dataset"],
    config["data_dir"],
    config["model"].replace("/", "--"),
    config["press_name"],
    # A threshold stands in its place, as what it removes depends on the texts.
    f"{share if mean.threshold is None else mean.threshold:.2f}",
    _optional("max_context", config["max_context_length"]),
    # kvpress does not compress the end of turn and the answer prefix.
    "whole_prompt" if summary["protocol"] == QUERY_AWARE else None,
    "query_aware" if config["query_aware"] else None,
    _optional("needle_depth", config["needle_depth"]),
  ]
  name = "__".join(_plain(part) for part in parts if part)
  contents = {
    "predictions.csv": formats.to_csv(
      _prediction(layout, answer, config["query_aware"])
      for answer in own.answers
    ),
    "metrics.json": _json(layout.metrics(mean.tasks, own.answers)),
    _CONFIG: _json(config),
  }
  return Folder(name, contents)


def _config(
  layout: KvpressLayout, summary: Summary, mean: Mean
) -> dict[str, Any]:
  """Builds the corresponding arguments of kvpress."""
  row = summary["rows"][0]
  _, bucket = layout.data_set(row["task"])
  press = "no_press" if mean.method == FULL else mean.method
  removed = 1 - mean.retention
  if mean.read_tokens < mean.kept_tokens:
    # A retrieval method removes nothing, or not what it does not read.
    press, removed = f"{press}-reads-{mean.budget}", mean.removed
  return {
    "dataset": _dataset(summary, bucket),
    "data_dir": layout.data_dir(row),
    "model": summary["model"],
    "device": summary["device"],
    "press_name": press,
    "compression_ratio": round(removed, 4),
    "key_channel_compression_ratio": None,
    "threshold": mean.threshold,
    # Of the samples that there were, not of kvpress's own data.
    "fraction": 1.0,
    "max_new_tokens": None,
    "max_context_length": row["length"] if layout.truncates else None,
    "query_aware": summary["protocol"] == QUERY_AWARE_KVPRESS,
    "needle_depth": layout.needle_depth(row),
    "model_kwargs": {"dtype": summary["dtype"]},
    "press_init_command": mean.options,
    "seed": summary["seed"],
    "kvjax": {
      **settings_of(summary),
      "method": mean.method,
      "options": mean.options,
      "budget": mean.budget,
      "retention": round(mean.retention, 4),
      "removed": round(mean.removed, 4),
      "kept_tokens": round(mean.kept_tokens, 2),
      "read_tokens": round(mean.read_tokens, 2),
      "cache_bytes": round(mean.cache_bytes),
      "samples": mean.samples,
      "versions": summary["versions"],
    },
  }


def _dataset(summary: Summary, bucket: str) -> str:
  """Returns the name of the benchmark, with kvjax's if we make its samples."""
  name = summary["benchmark"]
  if "files" not in summary["data"]:
    return f"kvjax_{name}"
  return f"{name}-e" if bucket else name


def _prediction(
  layout: KvpressLayout, answer: Answer, query_aware: bool
) -> dict[str, object]:
  removed = 1 - evictable(vars(answer)) / answer.context_tokens
  return {
    **layout.columns(answer),
    # kvpress moves it into the context, which has no column.
    "question": "" if query_aware else answer.question,
    "answer_prefix": answer.answer_prefix,
    "predicted_answer": answer.prediction,
    "compression_ratio": round(removed, 4),
  }


def _identity_of(place: pathlib.Path) -> object:
  """Returns None for folders that kvjax has not written."""
  try:
    return _identity(files.read_text(place / _CONFIG))
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _identity(config: str) -> object:
  identity = files.parse_json(config)["kvjax"]
  return [identity[name] for name in _OWN]


def _optional(name: str, value: object) -> str | None:
  return None if value is None else f"{name}{value}"


def _plain(text: str) -> str:
  """Replaces characters that some file systems reject in names."""
  inside = re.sub(r"^[^\w.+=-]+|[^\w.+=-]+$", "", text)
  return re.sub(r"[^\w.+=-]+", "-", inside)


def _json(value: object) -> str:
  # YAML has no surrogate pairs, so non-ASCII letters are not escaped.
  return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
