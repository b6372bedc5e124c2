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


class Needle(Benchmark):
  """A random number that is hidden in prose."""

  name = "needle"
  options: ClassVar[Sequence[Option]] = (DEPTHS,)
  inputs: ClassVar[Sequence[str]] = ("length", "essay", "words")
  presentation = Presentation(kvpress=NeedleLayout())
  samples_of: Any = staticmethod(grids.needle_samples)

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    texts = request.texts()
    words = {"words": texts.key_words} if "words" in self.inputs else {}
    samples = self.samples_of(
      self.lengths_of(request),
      grids.even_depths(request.value(DEPTHS)),
      request.samples or grids.SAMPLES,
      request.seed,
      lm.text.count,
      request.on_draw,
      essay=texts.essay,
      **words,
    )
    return Drawn(samples, texts.needle_origins)

  @override
  def total(self, request: Request) -> int:
    return grids.total(self.lengths_of(request), request)


class Passkey(Needle):
  """A number of 64 digits that is hidden in prose."""

  name = "passkey"
  options = (DEPTHS, CHAT)
  inputs = ("length", "essay")
  presentation = Presentation(score="exact", scored="exact answers")
  samples_of = staticmethod(grids.passkey_samples)

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    return super().draw(lm, request).with_chat(request)
