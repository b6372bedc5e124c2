"""The benchmarks of `evaluate`, one line each."""

from kvjax.experiments.benchmarks.base import Benchmark, Presentation
from kvjax.experiments.benchmarks.longbench.definition import LongBench
from kvjax.experiments.benchmarks.math.definition import (
  Aime25,
  Arithmetic,
  Math500,
)
from kvjax.experiments.benchmarks.multiturn.definition import Multiturn
from kvjax.experiments.benchmarks.needle.definition import Needle, Passkey
from kvjax.experiments.benchmarks.ruler.definition import Ruler

BENCHMARKS: dict[str, Benchmark] = {
  benchmark.name: benchmark
  for benchmark in (
    Ruler(),
    LongBench(),
    Needle(),
    Passkey(),
    Multiturn(),
    Math500(),
    Aime25(),
    Arithmetic(),
  )
}


def presentation(name: str) -> Presentation:
  """Returns how results are shown; `compare` has tasks, but no benchmark."""
  benchmark = BENCHMARKS.get(name)
  return Presentation() if benchmark is None else benchmark.presentation
