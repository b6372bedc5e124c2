"""LongBench as a benchmark of `evaluate`."""

from typing import override

from kvjax.errors import InputError
from kvjax.experiments.benchmarks import hub
from kvjax.experiments.benchmarks.base import (
  Benchmark,
  Drawn,
  Presentation,
  Request,
)
from kvjax.experiments.benchmarks.longbench import finder, reader, sets
from kvjax.experiments.benchmarks.longbench.averages import averages
from kvjax.experiments.benchmarks.longbench.layout import LongBenchLayout
from kvjax.experiments.benchmarks.options import CHAT, Option
from kvjax.experiments.run.results import Samples, data_name
from kvjax.models.pretrained import Pretrained

_STRICT = Option(
  "strict_official",
  False,
  "Scores LongBench with the bugs of its own code, as official tables do; the "
  "default fixes them.",
)


class LongBench(Benchmark):
  """LongBench and LongBench-E, from the user's files."""

  name = "longbench"
  options = (CHAT, _STRICT)
  inputs = ("tasks", "length", "data")
  tasks = sets.NAMES
  lengths = ()
  presentation = Presentation(
    scored="score", averages_of_tasks=averages, kvpress=LongBenchLayout()
  )

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    default = reader.usual_limit(lm.config.geometry.max_positions)
    (limit,) = self.lengths_of(request) or [default]
    path = hub.resolve(request.data or "")
    available = finder.find(path, sets.NAMES)
    names = request.tasks or [name for name in sets.SETS if name in available]
    samples: Samples = reader.samples(
      path, names, limit, lm.text, request.samples, request.on_draw
    )
    data = {"files": data_name(path)}
    if request.options.get(_STRICT.name):
      data["metrics"] = reader.FAULTS_INCLUDED
      samples = reader.strictly_official(samples)
    drawn = Drawn(samples, data).with_chat(request)
    return drawn._replace(about=reader.provenance(drawn.samples))

  @override
  def check(self, request: Request) -> None:
    if request.data is None:
      raise InputError(
        "LongBench is read from disk; give its folder or data.zip by --data, "
        "or its name on the Hugging Face hub."
      )
    if len(self.lengths_of(request)) > 1:
      raise InputError("--length takes one limit for LongBench, such as 7500.")
