"""What is hidden in prose at every length and depth, as benchmarks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, override

from kvjax.experiments.benchmarks import grids
from kvjax.experiments.benchmarks.base import (
  Benchmark,
  Drawn,
  Presentation,
  Request,
)
from kvjax.experiments.benchmarks.kvpress_layout import KvpressLayout
from kvjax.experiments.benchmarks.options import CHAT, DEPTHS, Option
from kvjax.experiments.run.results import Answer
from kvjax.models.pretrained import Pretrained


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


class _Grid(Benchmark):
  """Something that is hidden at every length and depth."""

  @override
  def total(self, request: Request) -> int:
    return grids.total(self.lengths_of(request), request)

  def cells(self, lm: Pretrained, request: Request) -> dict[str, Any]:
    """The arguments of `grids.needle_samples` that passkeys have, too."""
    return {
      "lengths": self.lengths_of(request),
      "depths": grids.even_depths(request.value(DEPTHS)),
      "samples": request.samples or grids.SAMPLES,
      "seed": request.seed,
      "count": lm.text.count,
      "on_draw": request.on_draw,
    }


class Needle(_Grid):
  """A random number that is hidden in prose."""

  name = "needle"
  options: ClassVar[Sequence[Option]] = (DEPTHS,)
  inputs: ClassVar[Sequence[str]] = ("length", "essay", "words")
  presentation = Presentation(kvpress=NeedleLayout())

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    texts = request.texts()
    samples = grids.needle_samples(
      **self.cells(lm, request), essay=texts.essay, words=texts.key_words
    )
    return Drawn(samples, texts.needle_origins)


class Passkey(_Grid):
  """A number of 64 digits that is hidden in prose."""

  name = "passkey"
  options: ClassVar[Sequence[Option]] = (DEPTHS, CHAT)
  inputs: ClassVar[Sequence[str]] = ("length", "essay")
  presentation = Presentation(score="exact", scored="exact answers")

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    texts = request.texts()
    samples = grids.passkey_samples(
      **self.cells(lm, request), essay=texts.essay
    )
    return Drawn(samples, texts.needle_origins).with_chat(request)
