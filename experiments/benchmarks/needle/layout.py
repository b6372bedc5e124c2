"""Needles in the layout of kvpress's evaluation."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, override

from kvjax.experiments.benchmarks.kvpress_layout import KvpressLayout
from kvjax.experiments.run.results import Answer


@dataclasses.dataclass(frozen=True)
class NeedleLayout(KvpressLayout):
  """A folder per length and depth, with the scores of each answer."""

  apart: Sequence[str] = ("length", "depth")
  truncates: bool = True

  @override
  def data_dir(self, row: Mapping[str, Any]) -> None:
    del row

  @override
  def needle_depth(self, row: Mapping[str, Any]) -> int:
    return round(100 * row["depth"])

  @override
  def columns(self, answer: Answer) -> dict[str, object]:
    needle = answer.scored_by.get("needle", "")
    return {**super().columns(answer), "needle": needle}

  @override
  def metrics(
    self, scores: Mapping[str, float], answers: Sequence[Answer]
  ) -> object:
    return [_metrics(answer) for answer in answers]


def _metrics(answer: Answer) -> dict[str, object]:
  shares = {name: score / 100 for name, score in answer.scores.items()}
  rouge = (
    {"rouge-1": {"f": shares.pop("rouge_1")}} if "rouge_1" in shares else {}
  )
  return {**rouge, **shares}
