"""Finds the smallest slice for a model, and the largest batch on it."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import kvjax
from kvjax.experiments.compilation.chips import Chip
from kvjax.experiments.compilation.engine_programs import Use
from kvjax.experiments.planning.batches import (
  Batches,
  Line,
  batches_of,
  largest,
  temporaries,
)
from kvjax.experiments.planning.compiling import (
  Advance,
  Planned,
  TooLargeError,
  compile_use,
)
from kvjax.experiments.planning.sizes import Sizes, sizes
from kvjax.experiments.planning.slices import Slice, slices_of

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
    asked = _compiled(use, chip, advance)
    if asked is not None and asked.fits:
      return _largest(asked, slice_, advance)
  return None


def batches_by_retention(
  found: Found, shares: Sequence[float]
) -> Mapping[float, Batches]:
  """Computes the largest batches for other retentions, by shapes.

  What programs need besides weights and cache is that of the plan.
  """
  chip, batches = found.most.chip, {}
  for share in shares:
    plan = dataclasses.replace(
      found.most.use.plan, budget=kvjax.Retention(share)
    )
    use = dataclasses.replace(found.most.use, plan=plan)
    batches[share] = batches_of(_line(use, chip), found.lines, chip)
  return batches


def _least(use: Use, slice_: Slice) -> tuple[Chip, Sizes]:
  """Returns the mesh whose weights and cache take the least of a device."""
  chips = [chip for chip in _meshes(use, slice_) if use.rows % chip.rows == 0]
  shares = [(chip, sizes(use, chip)) for chip in chips]
  return min(shares, key=lambda each: each[1].weights + each[1].cache)


def _largest(asked: Planned, slice_: Slice, advance: Advance) -> Found:
  """Finds the largest batch of a slice, on the mesh with the most room for it.

  By shapes, which do not tell what programs need besides: if that is too much,
  the mesh is the one that is known to fit.
  """
  advance(f"{slice_.name}, shapes", 0)
  chip = max(
    _meshes(asked.use, slice_),
    key=lambda chip: _line(asked.use, chip).most(chip.hbm_bytes, chip.rows),
  )
  found = _largest_on(chip, asked, slice_, advance)
  if found is not None and found.most.use.rows >= asked.use.rows:
    return found
  # What was asked for fits on its own mesh.
  found = _largest_on(asked.chip, asked, slice_, advance)
  assert found is not None
  return found


def _largest_on(
  chip: Chip, asked: Planned, slice_: Slice, advance: Advance
) -> Found | None:
  """Finds the largest batch on a mesh; see `_largest`. None if none fits."""
  known: dict[int, Planned | None] = {}
  if chip == asked.chip:
    known[asked.use.rows] = asked

  def compiled(rows: int) -> Planned | None:
    if rows not in known:
      use = dataclasses.replace(asked.use, rows=rows)
      known[rows] = _compiled(use, chip, advance)
    return known[rows]

  small, large = compiled(chip.rows), compiled(2 * chip.rows)
  if small is None:
    return None
  # A prompt alone on its devices runs through another program than several.
  if large is not None and (more := compiled(4 * chip.rows)) is not None:
    small, large = large, more
  for _ in range(_TRIALS):
    if large is None:
      break
    rows = min(largest(small, large))
    trial = compiled(rows) if rows > chip.rows else None
    if trial is None or trial.fits:
      break
    # The line through what did not fit is closer.
    large = trial
  fitting = [each for each in known.values() if each is not None and each.fits]
  if not fitting:
    return None
  most = max(fitting, key=lambda each: each.use.rows)
  confirmed_only = Batches(most.use.rows, most.use.rows)
  if large is None:
    level = Line(small.prefill.temporary, 0), Line(small.decode.temporary, 0)
    return Found(slice_, asked, most, confirmed_only, level)
  batches = largest(small, large)
  if min(batches) > most.use.rows:  # all trials failed
    batches = confirmed_only
  lines = temporaries(small, large)
  return Found(slice_, asked, most, batches, lines)


def _compiled(use: Use, chip: Chip, advance: Advance) -> Planned | None:
  """Compiles for a slice; None if not even a few layers fit."""
  try:
    return compile_use(use, chip, advance)
  except TooLargeError:
    return None


def _line(use: Use, chip: Chip) -> Line:
  """Bytes of weights and cache by rows, by shapes."""
  rows = chip.rows, 2 * chip.rows
  first, second = (
    sizes(dataclasses.replace(use, rows=count), chip) for count in rows
  )
  return Line.through(
    rows, (first.weights + first.cache, second.weights + second.cache)
  )


def _meshes(use: Use, slice_: Slice) -> Iterator[Chip]:
  """Yields the devices of a slice on all meshes, of powers of 2."""
  rows = 1
  while rows <= slice_.devices:
    yield slice_.load(rows, use.model.kv_heads)
    rows *= 2
