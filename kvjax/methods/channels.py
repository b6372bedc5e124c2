"""How many channels of the kept keys a cache stores."""

import dataclasses
import math

from kvjax.options.bounds import check_least, check_share


@dataclasses.dataclass(frozen=True)
class Channels:
  """A share of the channels of a head's keys to drop, and who decides.

  Attributes:
    share: share of the channels that is dropped.
    window: W, number of last queries that channels are chosen by.
  """

  share: float
  window: int

  def __post_init__(self) -> None:
    check_share(self, "share")
    check_least(self, window=1)

  def kept(self, dim: int) -> int:
    """Number of channels that stay of `dim`, at least one."""
    # The share is a decimal: in floating point, 0.29 * 100 is less than 29.
    return max(1, dim - math.floor(dim * self.share + 1e-9))
