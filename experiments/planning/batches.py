"""The largest batch of a slice, along a line through two batches."""

import math
from typing import NamedTuple

from kvjax.experiments.planning.compiling import Planned


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
    """Returns the line through two points."""
    row = (nbytes[1] - nbytes[0]) / (rows[1] - rows[0])
    return cls(nbytes[0] - row * rows[0], row)

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


def largest(small: Planned, large: Planned) -> Batches:
  """Computes the largest batches from what two of them need.

  Args:
    small: what some rows need.
    large: what more rows need.
  """
  rows = small.use.rows, large.use.rows
  hbm, step = small.chip.hbm_bytes, small.chip.rows

  def most(program: str) -> int:
    nbytes = (
      small.hbm(getattr(small, program)),
      large.hbm(getattr(large, program)),
    )
    return Line.through(rows, nbytes).most(hbm, step)

  return Batches(most("prefill"), most("decode"))
