"""What is hidden in prose at every length and depth, as benchmarks."""

from collections.abc import Sequence
from typing import Any, ClassVar, override

from kvjax.experiments.benchmarks import grids
from kvjax.experiments.benchmarks.base import (
  Benchmark,
  Drawn,
  Presentation,
  Request,
)
from kvjax.experiments.benchmarks.needle.layout import NeedleLayout
from kvjax.experiments.benchmarks.options import CHAT, DEPTHS, Option
from kvjax.models.pretrained import Pretrained


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
