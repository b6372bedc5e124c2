"""Bounds on the time of a step of decoding."""

from typing import NamedTuple

from kvjax.experiments.planning.compiling import Planned
from kvjax.experiments.planning.slices import Slice


class Bound(NamedTuple):
  """Seconds that a step takes at least, each as if it were alone.

  Attributes:
    memory: reads weights and cache at the full bandwidth of the memory.
    products: computes matrix products at the peak of bfloat16.
    links: receives what other devices send at the full bandwidth of all links.
  """

  memory: float
  products: float
  links: float

  @property
  def seconds(self) -> float:
    """The largest: at best, the others happen meanwhile."""
    return max(self)


def step_bound(planned: Planned, slice_: Slice) -> Bound:
  """Computes the bound of a step, which decodes a token of each row.

  Args:
    planned: what the programs need.
    slice_: the slice that they were compiled for.
  """
  read = planned.sizes.read
  if planned.sizes.retrieves:
    # The program reads what it retrieves of the cache.
    read = min(read, planned.decode.moved)
  along = len(planned.chip.devices) // planned.chip.rows
  # Of a result, a device has its own part; sums are scattered, then gathered.
  others = (along - 1) / along
  # Parts received, in results: that of a scattered sum is a part.
  parts = {
    "all-reduce": 2 * others,
    "reduce-scatter": along - 1,
    "collective-permute": 1,
  }
  received = sum(
    sent.nbytes * parts.get(opcode, others)
    for opcode, sent in planned.decode.sent.items()
  )
  return Bound(
    read / planned.chip.bytes_per_second,
    planned.sizes.flops / planned.chip.flops_per_second,
    received / slice_.link_bytes_per_second,
  )
