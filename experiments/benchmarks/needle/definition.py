"""A needle at every length and depth, as a benchmark of `evaluate`."""

from typing import override

from kvjax.experiments.benchmarks import grids
from kvjax.experiments.benchmarks.base import (
  Benchmark,
  Drawn,
  Presentation,
  Request,
)
from kvjax.experiments.benchmarks.needle.layout import NeedleLayout
from kvjax.experiments.benchmarks.options import DEPTHS
from kvjax.models.pretrained import Pretrained


class Needle(Benchmark):
  """A random number that is hidden in prose."""

  name = "needle"
  options = (DEPTHS,)
  inputs = ("length", "essay", "words")
  presentation = Presentation(kvpress=NeedleLayout())

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    texts = request.texts()
    samples = grids.needle_samples(
      self.lengths_of(request),
      grids.even_depths(request.value(DEPTHS)),
      request.samples or grids.SAMPLES,
      request.seed,
      lm.text.count,
      request.on_draw,
      essay=texts.essay,
      words=texts.key_words,
    )
    return Drawn(samples, texts.needle_origins)

  @override
  def total(self, request: Request) -> int:
    return grids.total(self.lengths_of(request), request)
