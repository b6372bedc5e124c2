"""Training batches, each a function of seed, stage and step only."""

import concurrent.futures
from collections.abc import Callable, Iterator

import numpy as np

from kvjax.experiments.reference.curriculum import Stage
from kvjax.experiments.reference.lessons import draw_row
from kvjax.experiments.reference.pieces import Pieces
from kvjax.experiments.reference.rows import Batch, pack

# Separates validation from every training batch.
_VALIDATION = 1_000_003


def training_batch(
  stage: Stage, index: int, step: int, seed: int, pieces: Pieces
) -> Batch:
  """Draws the batch of a step of stage number `index`."""
  rng = np.random.default_rng((seed, index, step))
  names = list(stage.mixture)
  shares = np.asarray(list(stage.mixture.values()))
  chosen = rng.choice(len(names), stage.batch, p=shares / shares.sum())
  least = int(stage.shortest * stage.length)
  # In stages with UUID questions, no row is shorter than one.
  lengths = rng.integers(least, stage.length + 1, stage.batch)
  rows = [
    draw_row(names[i], rng, pieces, int(length))
    for i, length in zip(chosen, lengths, strict=True)
  ]
  return pack(rows, stage.length, stage.slots, pieces.pad, rng)


def ahead[T](draw: Callable[[int], T], steps: range) -> Iterator[T]:
  """Yields `draw(step)` for each step, prefetching the next one."""
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    made = [pool.submit(draw, step) for step in steps[:1]]
    for step in steps:
      if step + 1 in steps:
        made.append(pool.submit(draw, step + 1))
      yield made.pop(0).result()


def validation_batch(
  lesson: str, stage: Stage, count: int, seed: int, pieces: Pieces
) -> Batch:
  """Draws `count` rows of a lesson that training never sees."""
  rng = np.random.default_rng((seed, _VALIDATION, stage.length))
  rows = [draw_row(lesson, rng, pieces, stage.length) for _ in range(count)]
  return pack(rows, stage.length, stage.slots, pieces.pad, rng)


def accuracy(batch: Batch, right: np.ndarray) -> tuple[float, float]:
  """Computes the shares of correct first symbols and complete answers.

  Args:
    batch: the batch.
    right: bool[B, M], which scored places were predicted correctly.
  """
  first = right[batch.first]
  wholes = []
  for row in range(len(right)):
    for number in range(batch.answer[row].max() + 1):
      wholes.append(right[row][batch.answer[row] == number].all())
  return (
    round(float(first.mean()), 4) if first.size else float("nan"),
    round(float(np.mean(wholes)), 4) if wholes else float("nan"),
  )
