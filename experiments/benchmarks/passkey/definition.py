"""A passkey at every length and depth, as a benchmark of `evaluate`."""

from typing import override

from kvjax.experiments.benchmarks import grids
from kvjax.experiments.benchmarks.base import (
  Benchmark,
  Drawn,
  Presentation,
  Request,
)
from kvjax.experiments.benchmarks.options import CHAT, DEPTHS
from kvjax.models.pretrained import Pretrained


class Passkey(Benchmark):
  """A number of 64 digits that is hidden in prose."""

  name = "passkey"
  options = (DEPTHS, CHAT)
  inputs = ("length", "essay")
  presentation = Presentation(score="exact", scored="exact answers")

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    texts = request.texts()
    samples = grids.passkey_samples(
      self.lengths_of(request),
      grids.even_depths(request.value(DEPTHS)),
      request.samples or grids.SAMPLES,
      request.seed,
      lm.text.count,
      request.on_draw,
      essay=texts.essay,
    )
    return Drawn(samples, texts.needle_origins).with_chat(request)

  @override
  def total(self, request: Request) -> int:
    return grids.total(self.lengths_of(request), request)
