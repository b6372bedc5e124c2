"""The largest batch of a slice, along a line through two batches."""

import math
from typing import NamedTuple

from kvjax.experiments.compilation.chips import Chip
from kvjax.experiments.planning.compiling import Needs, Planned


class Line(NamedTuple):
  """Bytes of a device's memory by the number of rows.

  Attributes:
    fixed: bytes without rows.
    row: bytes of each row.
  """

  fixed: float
  row: float

  @classmethod
  def through(cls, rows: tuple[int, int], nbytes: tuple[int, int]) -> "Line":
    """Returns the line through two points, or one that is level above them."""
    row = max(0, (nbytes[1] - nbytes[0]) / (rows[1] - rows[0]))
    return cls(nbytes[1] - row * rows[1] if row else max(nbytes), row)

  def plus(self, other: "Line") -> "Line":
    """Returns the line of both together."""
    return Line(self.fixed + other.fixed, self.row + other.row)

  def most(self, hbm: int, step: int) -> int:
    """Returns the most rows that fit, a multiple of `step`."""
    if self.fixed > hbm:
      return 0
    rows = (hbm - self.fixed) / max(self.row, 1.0)
    return math.floor(rows / step) * step


class Batches(NamedTuple):
  """The largest batch of each program.

  Attributes:
    prefill: contexts of a prefill.
    decode: rows that are decoded together.
  """

  prefill: int
  decode: int


def largest(
  small: Planned, large: Planned, beyond: tuple[int, Needs] | None = None
) -> Batches:
  """Computes the largest batches from what two of them need.

  Args:
    small: a batch.
    large: a larger one.
    beyond: the least rows that another program decodes, more than those of
      `small`, and what it needs for these.
  """
  stored = Line.through(
    (small.use.rows, large.use.rows),
    (
      small.sizes.weights + small.sizes.cache,
      large.sizes.weights + large.sizes.cache,
    ),
  )
  most = batches_of(stored, temporaries(small, large), small.chip)
  if beyond is None:
    return most
  decode = _largest_decoded(stored, small, large, beyond)
  return most._replace(decode=decode)


def _largest_decoded(
  stored: Line, small: Planned, large: Planned, beyond: tuple[int, Needs]
) -> int:
  """Computes the largest batch that either of two programs decodes.

  A program of which one batch is known needs as much more for each further row
  as the first one does, and the first one as much for each.
  """
  rows, needs = beyond
  if large.use.rows < rows:
    _, first = temporaries(small, large)
  else:
    first = Line(0, small.decode.temporary / small.use.rows)
  if large.use.rows > rows:
    nbytes = needs.temporary, large.decode.temporary
    second = Line.through((rows, large.use.rows), nbytes)
  else:
    second = Line(needs.temporary - first.row * rows, first.row)
  chip = small.chip
  many = stored.plus(second).most(chip.hbm_bytes, chip.rows)
  if many >= rows:
    return many
  few = stored.plus(first).most(chip.hbm_bytes, chip.rows)
  return min(few, rows - chip.rows)


def temporaries(small: Planned, large: Planned) -> tuple[Line, Line]:
  """Returns the lines of what prefill and decoding need besides."""
  rows = small.use.rows, large.use.rows
  prefill = small.prefill.temporary, large.prefill.temporary
  decode = small.decode.temporary, large.decode.temporary
  return Line.through(rows, prefill), Line.through(rows, decode)


def batches_of(stored: Line, lines: tuple[Line, Line], chip: Chip) -> Batches:
  """Computes the largest batches of a device.

  Args:
    stored: weights and cache.
    lines: what prefill and decoding need besides.
    chip: the device, and how many of them share out rows.
  """
  prefill, decode = (
    stored.plus(line).most(chip.hbm_bytes, chip.rows) for line in lines
  )
  return Batches(prefill, decode)
