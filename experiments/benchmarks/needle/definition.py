"""Needle and passkey samples at every length and depth, for heatmaps.

The needle is a unique random number at the end of a sentence, which no model
knows from elsewhere. The passkey has 64 digits and is stated twice (Yuan et al.
2024, `longctx_bench`). Lengths are in tokens of the model's tokenizer, also for
the passkey, whose paper counts words: see `passkey.length_of_words`.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, override

from kvjax.experiments.benchmarks.base import (
  CHAT,
  Benchmark,
  Drawn,
  Option,
  Presentation,
  Request,
)
from kvjax.experiments.benchmarks.kvpress_layout import KvpressLayout
from kvjax.experiments.run.results import Answer, Part
from kvjax.experiments.tasks import niah, passkey, prose
from kvjax.experiments.tasks.sample import OnDraw, Sample, ignore
from kvjax.experiments.tasks.words import BUILT_IN, KeyWords
from kvjax.models.pretrained import Pretrained

NEEDLE = niah.NeedleTask("needle", "essay", max_new_tokens=30)
PASSKEY = "passkey"
# Default samples per length and depth.
SAMPLES = 3
DEPTHS = Option(
  "depths",
  10,
  "Number of depths of needle and passkey.",
  lowest=1,
  highest=1000,
)

_Draw = Callable[[random.Random, int, float], Sample]


@dataclasses.dataclass(frozen=True)
class Grid:
  """What samples of every length and depth have in common.

  Attributes:
    lengths: maximum tokens of prompt and answer.
    depths: positions of the needle from 0, the start, to 1, the end.
    samples: samples per length and depth.
    seed: seed of all samples.
    count: counts the tokens of a text.
    on_draw: called for every sample.
    essay: the prose around the needle.
  """

  lengths: Sequence[int]
  depths: Sequence[float]
  samples: int
  seed: int
  count: Callable[[str], int]
  on_draw: OnDraw = ignore
  essay: prose.Essay = "heldout"

  def draw(self, task: str, one: _Draw) -> dict[Part, list[Sample]]:
    """Draws the samples of a task, of which `one` draws each."""
    grid: dict[Part, list[Sample]] = {}
    for length in self.lengths:
      drawn = grid[Part(task, length)] = []
      for depth in self.depths:
        for number in range(self.samples):
          rng = random.Random(f"{self.seed} {task} {depth} {number}")
          sample = one(rng, length, depth)
          # Its number depends on how many samples and depths there are.
          origin = f"{depth} {number}"
          drawn.append(dataclasses.replace(sample, origin=origin))
          self.on_draw(task, 1)
    return grid


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


class _ByDepth(Benchmark):
  """Something that is hidden at every length and depth."""

  @override
  def total(self, request: Request) -> int:
    samples = request.samples or SAMPLES
    return len(self.lengths_of(request)) * request.value(DEPTHS) * samples

  def grid(self, lm: Pretrained, request: Request, essay: prose.Essay) -> Grid:
    """What is asked for, in this prose."""
    return Grid(
      self.lengths_of(request),
      even_depths(request.value(DEPTHS)),
      request.samples or SAMPLES,
      request.seed,
      lm.text.count,
      request.on_draw,
      essay,
    )


class Needle(_ByDepth):
  """A random number that is hidden in prose."""

  name = "needle"
  options: ClassVar[Sequence[Option]] = (DEPTHS,)
  inputs: ClassVar[Sequence[str]] = ("length", "essay", "words")
  presentation = Presentation(kvpress=NeedleLayout())

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    texts = request.texts()
    grid = self.grid(lm, request, texts.essay)
    samples = needle_samples(grid, texts.key_words)
    return Drawn(samples, texts.needle_origins)


class Passkey(_ByDepth):
  """A number of 64 digits that is hidden in prose."""

  name = "passkey"
  options: ClassVar[Sequence[Option]] = (DEPTHS, CHAT)
  inputs: ClassVar[Sequence[str]] = ("length", "essay")
  presentation = Presentation(score="exact", scored="exact answers")

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    texts = request.texts()
    samples = passkey_samples(self.grid(lm, request, texts.essay))
    return Drawn(samples, texts.needle_origins).with_chat(request)


def even_depths(count: int) -> list[float]:
  """Returns `count` even depths from the start, 0, to the end, 1."""
  return [index / max(count - 1, 1) for index in range(count)]


def needle_samples(
  grid: Grid, words: KeyWords = BUILT_IN
) -> dict[Part, list[Sample]]:
  """Draws samples of a number hidden in prose, by length and depth.

  Args:
    grid: lengths, depths and prose.
    words: the words of the number's key.

  Raises:
    InputError: a length is too short.
  """
  task = dataclasses.replace(NEEDLE, words=words)

  def draw(rng: random.Random, length: int, depth: float) -> Sample:
    sample = niah.sample(
      task, rng, length, grid.count, essay=grid.essay, depths=[depth]
    )
    (key,) = sample.metadata["keys"]
    needle = niah.NEEDLE.format(
      kind=NEEDLE.values, key=key, value=sample.answers[0]
    )
    about = {**sample.metadata, "depth": depth, "needle": needle}
    return dataclasses.replace(
      sample, metric="needle", metadata=about, scored_by=("needle",)
    )

  return grid.draw(NEEDLE.name, draw)


def passkey_samples(grid: Grid) -> dict[Part, list[Sample]]:
  """Draws samples of 64 digits hidden in prose; see `needle_samples`."""

  def draw(rng: random.Random, length: int, depth: float) -> Sample:
    sample = passkey.passkey(
      rng, length, grid.count, essay=grid.essay, depth=depth, official=True
    )
    return dataclasses.replace(sample, chat=False)

  return grid.draw(PASSKEY, draw)
