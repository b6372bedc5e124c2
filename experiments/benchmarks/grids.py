"""Needle and passkey at every length and depth, as heatmaps show them.

The needle is a unique random number, so that no model knows it from elsewhere,
at the end of a sentence; the passkey has 64 digits and is stated twice (Yuan et
al. 2024, `longctx_bench`). Lengths are in tokens of the model's own tokenizer,
for the passkey as well, whose paper counts words.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence

from kvjax.experiments.results import Part
from kvjax.experiments.tasks import needles, passkey
from kvjax.experiments.tasks.sample import OnDraw, Sample, ignore

NEEDLE = needles.NeedleTask("needle", "essay", max_new_tokens=30)
PASSKEY = "passkey"

_Draw = Callable[[random.Random, int, float], Sample]


def even_depths(count: int) -> list[float]:
  """So many depths from the start, 0, to the end, 1."""
  return [index / max(count - 1, 1) for index in range(count)]


def needle_samples(
  lengths: Sequence[int],
  depths: Sequence[float],
  samples: int,
  seed: int,
  count: Callable[[str], int],
  on_draw: OnDraw = ignore,
) -> dict[Part, list[Sample]]:
  """A number hidden in prose: so many samples for each length and depth.

  Args:
    lengths: bounds on the tokens of prompt and answer.
    depths: where the needle stands, 0 the start and 1 the end.
    samples: per length and depth.
    seed: of all samples.
    count: number of tokens of a text.
    on_draw: told of every sample.

  Raises:
    InputError: a length is too short.
  """

  def draw(rng: random.Random, length: int, depth: float) -> Sample:
    sample = needles.sample(NEEDLE, rng, length, count, depths=[depth])
    (key,) = sample.metadata["keys"]
    needle = needles.NEEDLE.format(
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
) -> dict[Part, list[Sample]]:
  """64 digits hidden in prose; arguments and errors as `needle_samples`."""

  def draw(rng: random.Random, length: int, depth: float) -> Sample:
    sample = passkey.passkey(rng, length, count, depth=depth)
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
  found: dict[Part, list[Sample]] = {}
  for length in lengths:
    drawn = found[Part(task, length)] = []
    for depth in depths:
      for number in range(samples):
        rng = random.Random(f"{seed} {task} {depth} {number}")
        drawn.append(draw(rng, length, depth))
        on_draw(task, 1)
  return found
