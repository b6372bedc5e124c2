"""RULER as a benchmark of `evaluate`."""

import statistics
from collections.abc import Mapping, Sequence
from typing import override

from kvjax.experiments.benchmarks import hub
from kvjax.experiments.benchmarks.base import (
  Benchmark,
  Drawn,
  Presentation,
  Request,
)
from kvjax.experiments.benchmarks.kvpress_layout import KvpressLayout
from kvjax.experiments.benchmarks.ruler import generator, published
from kvjax.experiments.run.digests import data_name
from kvjax.models.pretrained import Pretrained

# Llama-2-7B's average at 4,096 tokens.
_ENOUGH = 85.6


def _averages(scores: Mapping[int, float]) -> dict[str, str]:
  """Formats the averages of a model or method.

  Args:
    scores: the tasks' mean, 0 to 100, at each length.

  Returns:
    The means with weights 1, 2, ... from the shortest length, "rising", and
    from the longest, "falling", and the longest length with enough, if any.
  """
  lengths = sorted(scores)
  values = [scores[length] for length in lengths]
  weights = range(1, len(values) + 1)
  reached = [length for length in lengths if scores[length] >= _ENOUGH]
  longest = str(max(reached)) if reached else f"< {lengths[0]}"
  return {
    "rising": f"{statistics.fmean(values, weights):.1f}",
    "falling": f"{statistics.fmean(values, reversed(weights)):.1f}",
    f"effective length (≥ {_ENOUGH})": longest,
  }


_SAMPLES = 20


class Ruler(Benchmark):
  """RULER's 13 tasks, generated or from published files."""

  name = "ruler"
  inputs = ("tasks", "length", "data", "essay", "words", "squad", "hotpotqa")
  tasks = generator.TASKS
  lengths = (2048,)
  presentation = Presentation(
    averages_of_lengths=_averages, kvpress=KvpressLayout(metric="string_match")
  )

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    if request.data is not None:
      path = hub.resolve(request.data)
      samples = published.load(
        path, request.tasks, request.lengths, request.samples
      )
      return Drawn(samples, {"files": data_name(path)})
    choice = _choice(request)
    lengths = self.lengths_of(request)
    samples = generator.samples(
      choice.tasks,
      lengths,
      request.samples or _SAMPLES,
      request.seed,
      lm.text.count,
      request.texts(),
      request.on_draw,
    )
    notes = [
      f"{task} is left out at {length} tokens: it needs more words, by --words."
      for length in lengths
      for task in choice.tasks
      if (task, length) not in samples
    ]
    missing = generator.missing(_tasks(request), lengths, samples)
    about = {"left out": ", ".join(missing)} if missing else {}
    return Drawn(samples, choice.data, [*choice.notes, *notes], about)

  @override
  def total(self, request: Request) -> int | None:
    if request.data is not None:
      return None
    parts = len(_choice(request).tasks) * len(self.lengths_of(request))
    return parts * (request.samples or _SAMPLES)

  @override
  def check(self, request: Request) -> None:
    if request.data is None:
      _choice(request)


def _choice(request: Request) -> generator.Choice:
  """Drops tasks whose file is missing."""
  return generator.choose(_tasks(request), request.texts())


def _tasks(request: Request) -> Sequence[str]:
  return generator.TASKS if request.tasks is None else request.tasks
