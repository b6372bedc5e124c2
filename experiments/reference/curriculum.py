"""The curriculum of the bundled model: stages, mixtures and gates.

Retrieval starts on short rows with a small gap between key and value, and then
moves to RULER's prompts and to longer rows. A stage that misses its gate is
extended. The model card reports the results.
"""

import csv
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Stage:
  """One stage of training.

  Attributes:
    name: name in the log.
    length: tokens per row, and the largest position trained on.
    batch: rows per step.
    micro: rows per forward and backward pass; divides `batch`.
    steps: optimizer steps.
    slots: scored places per row.
    mixture: shares of the lessons.
    rates: learning rate of the first and last step, geometric in between.
    shortest: the minimum length of a row, as a share of `length`.
    gate: minimum accuracy on first symbols per lesson.
    layers: deepens the decoder to this number of layers first and restarts the
      optimizer with a warm-up; None continues with the current decoder.
  """

  name: str
  length: int
  batch: int
  micro: int
  steps: int
  slots: int
  mixture: Mapping[str, float]
  rates: tuple[float, float]
  shortest: float = 1.0
  gate: Mapping[str, float] = dataclasses.field(default_factory=dict)
  layers: int | None = None

  def rate(self, step: int) -> float:
    """Computes the learning rate, geometric from `rates[0]` to `rates[1]`.

    Steps beyond `steps` belong to extensions of half as many steps. Each
    repeats the rates of the second half of the stage.
    """
    done = step / self.steps
    if step >= self.steps:
      half = self.steps // 2
      done = 0.5 + 0.5 * ((step - self.steps) % half) / half
    first, last = self.rates
    return first * (last / first) ** done

  def passed(self, first: Mapping[str, float]) -> bool:
    """Returns whether accuracies on first symbols by lesson pass the gate."""
    return all(first[name] >= least for name, least in self.gate.items())


def _shares(text: str) -> dict[str, float]:
  """Reads lessons, each followed by its share or the least accuracy."""
  words = text.split()
  return dict(zip(words[::2], map(float, words[1::2]), strict=True))


def _stage(row: Mapping[str, str]) -> Stage:
  numbers = ("length", "batch", "micro", "steps", "slots")
  sizes: dict[str, Any] = {name: int(row[name]) for name in numbers}
  return Stage(
    name=row["name"],
    **sizes,
    mixture=_shares(row["mixture"]),
    rates=(float(row["first"]), float(row["last"])),
    shortest=float(row["shortest"]),
    gate=_shares(row["gate"]),
    layers=int(row["layers"]) if row["layers"] else None,
  )


_TABLE = pathlib.Path(__file__).with_name("stages.tsv").read_text("utf-8")
STAGES = tuple(
  map(_stage, csv.DictReader(_TABLE.splitlines(), dialect="excel-tab"))
)
