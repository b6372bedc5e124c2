"""Finds the smallest slice for a model, and the largest batch on it."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import kvjax
from kvjax.experiments.planning.batches import Batches, Line, largest
from kvjax.experiments.planning.compiling import (
  Advance,
  Planned,
  compile_use,
)
from kvjax.experiments.planning.sizes import Sizes, sizes
from kvjax.experiments.planning.slices import Slice, slices_of
from kvjax.experiments.tpu.chips import Chip
from kvjax.experiments.tpu.engine_programs import Use

# Compilations that confirm a batch before the search takes what it has.
_TRIALS = 3


@dataclasses.dataclass(frozen=True)
class Found:
  """The smallest slice of a kind of chip, and its largest batch.

  Attributes:
    slice: the slice.
    asked: what the batch that was asked for takes.
    most: what the largest batch takes; `asked` if there is no larger one.
    batches: the largest batch of each program, on the mesh of `most`.
    lines: bytes besides weights and cache by rows, of prefill and decoding.
  """

  slice: Slice
  asked: Planned
  most: Planned
  batches: Batches
  lines: tuple[Line, Line]


def search(use: Use, kind: str, advance: Advance) -> Found | None:
  """Finds the smallest slice of a kind of chip that fits a batch.

  Shapes alone exclude slices that are too small for weights and cache. The
  others are compiled in order until one fits.

  Args:
    use: the method, the model, and the batch.
    kind: the kind of chip.
    advance: shows progress.

  Returns:
    The slice, and the largest batch on it; None if none fits.
  """
  for slice_ in slices_of(kind):
    advance(f"{slice_.name}, shapes", 0)
    chip, shares = _least(use, slice_)
    if shares.weights + shares.cache > chip.hbm_bytes:
      continue
    asked = compile_use(use, chip, advance)
    if asked.fits:
      return _largest(asked, slice_, advance)
  return None


def batches_by_retention(
  found: Found, shares: Sequence[float]
) -> Mapping[float, int]:
  """Computes the largest batch for other retentions, by shapes.

  What programs need besides weights and cache is that of the plan.

  Args:
    found: the slice, and its plan.
    shares: retentions.
  """
  chip = found.most.chip
  step = chip.rows
  batches = {}
  for share in shares:
    plan = dataclasses.replace(
      found.most.use.plan, budget=kvjax.Retention(share)
    )
    use = dataclasses.replace(found.most.use, plan=plan)
    stored = _line(use, chip)
    batches[share] = min(
      Line(stored.fixed + own.fixed, stored.row + own.row).most(
        chip.hbm_bytes, step
      )
      for own in found.lines
    )
  return batches


def _least(use: Use, slice_: Slice) -> tuple[Chip, Sizes]:
  """Returns the mesh whose weights and cache take the least of a device."""
  chips = [slice_.load(rows) for rows in _rows(slice_) if use.rows % rows == 0]
  shares = [(chip, sizes(use, chip)) for chip in chips]
  return min(shares, key=lambda each: each[1].weights + each[1].cache)


def _largest(asked: Planned, slice_: Slice, advance: Advance) -> Found:
  """Finds the mesh and the batch that use the memory of a slice best."""
  advance(f"{slice_.name}, shapes", 0)
  chips = [slice_.load(rows) for rows in _rows(slice_)]
  chip = max(
    chips,
    key=lambda chip: _line(asked.use, chip).most(chip.hbm_bytes, chip.rows),
  )

  def compiled(rows: int) -> Planned:
    if (rows, chip.rows) == (asked.use.rows, asked.chip.rows):
      return asked
    use = dataclasses.replace(asked.use, rows=rows)
    return compile_use(use, chip, advance)

  small, large = compiled(chip.rows), compiled(2 * chip.rows)
  batches = largest(small, large)
  most = asked
  for _ in range(_TRIALS):
    rows = min(batches)
    if rows <= max(most.use.rows, large.use.rows):
      break
    most = compiled(rows)
    if most.fits:
      break
    # The line through what did not fit is closer.
    batches = largest(small, most)
  lines = tuple(
    Line.through(
      (small.use.rows, large.use.rows),
      (
        getattr(small, program).temporary,
        getattr(large, program).temporary,
      ),
    )
    for program in ("prefill", "decode")
  )
  return Found(slice_, asked, most, batches, (lines[0], lines[1]))


def _line(use: Use, chip: Chip) -> Line:
  """Bytes of weights and cache by rows, by shapes."""
  rows = chip.rows, 2 * chip.rows
  first, second = (
    sizes(dataclasses.replace(use, rows=count), chip) for count in rows
  )
  return Line.through(
    rows, (first.weights + first.cache, second.weights + second.cache)
  )


def _rows(slice_: Slice) -> Iterator[int]:
  """Yields the sizes of "data" of all meshes of a slice."""
  rows = 1
  while rows <= slice_.devices:
    yield rows
    rows *= 2
