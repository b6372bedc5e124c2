"""LongBench as a benchmark of `evaluate`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, override

from kvjax.errors import InputError
from kvjax.experiments.benchmarks import hub
from kvjax.experiments.benchmarks.base import (
  CHAT,
  Benchmark,
  Drawn,
  Option,
  Presentation,
  Request,
)
from kvjax.experiments.benchmarks.kvpress_layout import KvpressLayout
from kvjax.experiments.benchmarks.longbench import finder, reader, sets
from kvjax.experiments.benchmarks.longbench.averages import averages
from kvjax.experiments.run.digests import data_name
from kvjax.experiments.run.results import Answer, Samples
from kvjax.models.pretrained import Pretrained


@dataclasses.dataclass(frozen=True)
class LongBenchLayout(KvpressLayout):
  """A folder per dataset, with one number or one per bucket of lengths."""

  truncates: bool = True

  @override
  def data_set(self, task: str) -> tuple[str, str]:
    """Returns a dataset and, for LongBench-E, a bucket: `qasper_e`, `0-4k`."""
    base, separator, bucket = task.rpartition("_e_")
    return (f"{base}_e", bucket) if separator else (task, "")

  @override
  def groups(self, tasks: Sequence[str]) -> list[list[str]]:
    by_set: dict[str, list[str]] = {}
    for task in tasks:
      by_set.setdefault(self.data_set(task)[0], []).append(task)
    return list(by_set.values())

  @override
  def data_dir(self, row: Mapping[str, Any]) -> str:
    return self.data_set(row["task"])[0]

  @override
  def columns(self, answer: Answer) -> dict[str, object]:
    data_set, bucket = self.data_set(answer.task)
    return {
      "task": f"{data_set.removesuffix('_e')}-e" if bucket else data_set,
      "answers": str(answer.answers),
      "all_classes": str(list(answer.scored_by.get("all_classes", ()))),
      "length": answer.scored_by.get("words", ""),
    }

  @override
  def metrics(
    self, scores: Mapping[str, float], answers: Sequence[Answer]
  ) -> object:
    buckets = {
      self.data_set(task)[1]: round(score, 2) for task, score in scores.items()
    }
    return buckets.get("", buckets)


_STRICT = Option(
  "strict_official",
  False,
  "Scores LongBench with the bugs of its own code, as official tables do; the "
  "default fixes them.",
)


class LongBench(Benchmark):
  """LongBench and LongBench-E, from the user's files."""

  name = "longbench"
  options = (CHAT, _STRICT)
  inputs = ("tasks", "length", "data")
  tasks = sets.NAMES
  lengths = ()
  presentation = Presentation(
    scored="score", averages_of_tasks=averages, kvpress=LongBenchLayout()
  )

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    default = reader.usual_limit(lm.model.geometry.max_positions)
    (limit,) = self.lengths_of(request) or [default]
    path = hub.resolve(request.data or "")
    available = finder.find(path, sets.NAMES)
    names = request.tasks or [name for name in sets.SETS if name in available]
    samples: Samples = reader.samples(
      path, names, limit, lm.text, request.samples, request.on_draw
    )
    data = {"files": data_name(path)}
    if request.options.get(_STRICT.name):
      data["metrics"] = reader.FAULTS_INCLUDED
      samples = reader.strictly_official(samples)
    drawn = Drawn(samples, data).with_chat(request)
    return drawn._replace(about=reader.provenance(drawn.samples))

  @override
  def check(self, request: Request) -> None:
    if request.data is None:
      raise InputError(
        "LongBench is read from disk; give its folder or data.zip by --data, "
        "or its name on the Hugging Face hub."
      )
    if len(self.lengths_of(request)) > 1:
      raise InputError("--length takes one limit for LongBench, such as 7500.")
