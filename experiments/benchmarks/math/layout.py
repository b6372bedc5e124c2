"""Mathematics in the layout of kvpress's evaluation."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, override

from kvjax.experiments.benchmarks.kvpress_layout import KvpressLayout
from kvjax.experiments.run.results import Answer

_RIGHT = 100.0


@dataclasses.dataclass(frozen=True)
class MathLayout(KvpressLayout):
  """One folder, with the numbers of answers that are given and right."""

  @override
  def data_dir(self, row: Mapping[str, Any]) -> None:
    del row

  @override
  def columns(self, answer: Answer) -> dict[str, object]:
    return {"task": answer.task, "answer": answer.answers[0]}

  @override
  def metrics(
    self, scores: Mapping[str, float], answers: Sequence[Answer]
  ) -> object:
    correct = sum(answer.score == _RIGHT for answer in answers)
    return {
      "correct": correct,
      "answered": sum(answer.scores["boxed"] > 0 for answer in answers),
      "accuracy": round(correct / max(len(answers), 1), 4),
      "total": len(answers),
    }
