"""Needle and passkey samples at every length and depth, for heatmaps.

The needle is a unique random number at the end of a sentence, which no model
knows from elsewhere. The passkey has 64 digits and is stated twice (Yuan et al.
2024, `longctx_bench`). Lengths are in tokens of the model's tokenizer, also for
the passkey, whose paper counts words: see `passkey.length_of_words`.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence

from kvjax.experiments.benchmarks.base import Request
from kvjax.experiments.benchmarks.options import DEPTHS
from kvjax.experiments.run.results import Part
from kvjax.experiments.tasks import niah, passkey, prose
from kvjax.experiments.tasks.sample import OnDraw, Sample, ignore
from kvjax.experiments.tasks.words import BUILT_IN, KeyWords

NEEDLE = niah.NeedleTask("needle", "essay", max_new_tokens=30)
PASSKEY = "passkey"
# Default samples per length and depth.
SAMPLES = 3

_Draw = Callable[[random.Random, int, float], Sample]


def even_depths(count: int) -> list[float]:
  """Returns `count` even depths from the start, 0, to the end, 1."""
  return [index / max(count - 1, 1) for index in range(count)]


def total(lengths: Sequence[int], request: Request) -> int:
  """Counts the samples of a grid."""
  return len(lengths) * request.value(DEPTHS) * (request.samples or SAMPLES)


def needle_samples(
  lengths: Sequence[int],
  depths: Sequence[float],
  samples: int,
  seed: int,
  count: Callable[[str], int],
  on_draw: OnDraw = ignore,
  *,
  essay: prose.Essay = "heldout",
  words: KeyWords = BUILT_IN,
) -> dict[Part, list[Sample]]:
  """Draws samples of a number hidden in prose, by length and depth.

  Args:
    lengths: maximum tokens of prompt and answer.
    depths: positions of the needle from 0, the start, to 1, the end.
    samples: samples per length and depth.
    seed: seed of all samples.
    count: counts the tokens of a text.
    on_draw: called for every sample.
    essay: the prose around the needle.
    words: the words of its key.

  Raises:
    InputError: a length is too short.
  """
  task = dataclasses.replace(NEEDLE, words=words)

  def draw(rng: random.Random, length: int, depth: float) -> Sample:
    sample = niah.sample(task, rng, length, count, essay=essay, depths=[depth])
    (key,) = sample.metadata["keys"]
    needle = niah.NEEDLE.format(
      kind=NEEDLE.values, key=key, value=sample.answers[0]
    )
    about = {**sample.metadata, "depth": depth, "needle": needle}
    return dataclasses.replace(sample, metric="needle", metadata=about)

  return _grid(NEEDLE.name, draw, lengths, depths, samples, seed, on_draw)


def passkey_samples(
  lengths: Sequence[int],
  depths: Sequence[float],
  samples: int,
  seed: int,
  count: Callable[[str], int],
  on_draw: OnDraw = ignore,
  *,
  essay: prose.Essay = "heldout",
) -> dict[Part, list[Sample]]:
  """Draws samples of 64 digits hidden in prose; see `needle_samples`."""

  def draw(rng: random.Random, length: int, depth: float) -> Sample:
    sample = passkey.passkey(
      rng, length, count, essay=essay, depth=depth, official=True
    )
    return dataclasses.replace(sample, chat=False)

  return _grid(PASSKEY, draw, lengths, depths, samples, seed, on_draw)


def _grid(
  task: str,
  draw: _Draw,
  lengths: Sequence[int],
  depths: Sequence[float],
  samples: int,
  seed: int,
  on_draw: OnDraw,
) -> dict[Part, list[Sample]]:
  grid: dict[Part, list[Sample]] = {}
  for length in lengths:
    drawn = grid[Part(task, length)] = []
    for depth in depths:
      for number in range(samples):
        rng = random.Random(f"{seed} {task} {depth} {number}")
        drawn.append(draw(rng, length, depth))
        on_draw(task, 1)
  return grid
