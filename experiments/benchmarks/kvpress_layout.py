"""How kvpress's evaluation lays out the results of a benchmark."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.experiments.run.results import Answer


@dataclasses.dataclass(frozen=True)
class KvpressLayout:
  """The layout of RULER; other benchmarks override what differs.

  Attributes:
    metric: name of a task's score.
    apart: fields of rows with a folder for each value.
    truncates: whether lengths are those that prompts are cut to.
  """

  metric: str = "score"
  apart: Sequence[str] = ("length",)
  truncates: bool = False

  def data_set(self, task: str) -> tuple[str, str]:
    """Returns the dataset of a task, and its bucket of lengths if any."""
    return task, ""

  def groups(self, tasks: Sequence[str]) -> list[list[str]]:
    """Groups the tasks that share a folder."""
    return [list(tasks)]

  def data_dir(self, row: Mapping[str, Any]) -> str | None:
    """Returns the subfolder of the dataset that a row is of."""
    return str(row["length"])

  def needle_depth(self, row: Mapping[str, Any]) -> int | None:
    """Returns the depth of the needle in percent."""
    del row
    return None

  def columns(self, answer: Answer) -> dict[str, object]:
    """Returns the columns, besides the prediction, that a scorer reads."""
    return {"task": answer.task, "answer": str(answer.answers)}

  def metrics(
    self, scores: Mapping[str, float], answers: Sequence[Answer]
  ) -> object:
    """Returns the content of metrics.json, from scores by task."""
    del answers
    return {
      task: {self.metric: round(score, 2)} for task, score in scores.items()
    }
