"""LongBench in the layout of kvpress's evaluation."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, override

from kvjax.experiments.benchmarks.kvpress_layout import KvpressLayout
from kvjax.experiments.run.results import Answer


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
