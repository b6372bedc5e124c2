"""The ranges of features that a calibration was measured on."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from kvjax.calibration.features import Features

# A feature may exceed its measured range by this share before a warning.
_SLACK = 0.1


class InRange(NamedTuple):
  """Features in their ranges.

  Attributes:
    features: those outside are replaced by the nearest in range.
    far: contexts with a feature that is outside by more than a tenth.
    outside: in words, the ranges of the features that are so far outside.
  """

  features: Features
  far: Bool[np.ndarray, " B"]
  outside: tuple[str, ...]


def in_range(
  features: Features, ranges: Sequence[tuple[str, float, float]]
) -> InRange:
  """Replaces features outside of their ranges by the nearest in range.

  Args:
    features: the features; those that are None stay None.
    ranges: minimum and maximum by the names of features.
  """
  clamped, outside = {}, []
  far = np.zeros(np.shape(features.nll), bool)
  for name, low, high in ranges:
    values = getattr(features, name)
    if values is None:
      continue
    clamped[name] = np.clip(values, low, high)  # NaN stays NaN.
    slack = _SLACK * max(abs(low), abs(high))
    beyond = (values < low - slack) | (values > high + slack)
    if np.any(beyond):
      outside.append(f"{name} of {low:g} to {high:g}")
      far |= beyond
  return InRange(features._replace(**clamped), far, tuple(outside))
