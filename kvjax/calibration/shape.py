"""The mean quality at each retention, which the curves of contexts bend."""

import numpy as np
from jaxtyping import Float

from kvjax import openblas
from kvjax.calibration.measured import Triples

# Pairs of a measured retention, ascending, and the mean quality there.
Shape = tuple[tuple[float, float], ...]


def mean_quality(triples: Triples, weight: Float[np.ndarray, " M"]) -> Shape:
  """Computes the mean quality of triples at each of their retentions.

  The means are those of isotonic regression, which never fall as the retention
  rises. One triple with the retention as its quality is added to each: no mean
  is 0 or 1, which no curve bends, and none equals another, so that a target
  tells all retentions apart.

  Args:
    triples: the measurements, with qualities of at most 1.
    weight: weight of each triple. Retentions without any are left out.
  """
  openblas.load()
  # Takes half as long to import as JAX.
  from scipy.optimize import isotonic_regression

  used = weight > 0
  grid, place = np.unique(triples.retention[used], return_inverse=True)
  count = np.bincount(place, weight[used])
  kept = np.bincount(place, weight[used] * triples.ratio[used])
  number = np.mean(count)
  rising = isotonic_regression(kept / count, weights=count).x
  means = (number * rising + grid) / (number + 1)
  return tuple(zip(grid.tolist(), means.tolist(), strict=True))


def shaped(
  retention: Float[np.ndarray, "*M"], shape: Shape
) -> Float[np.ndarray, "*M"]:
  """Interpolates the mean quality at retentions, from 0 at 0 to 1 at 1.

  Without a shape, it is the retention itself.
  """
  retention = np.asarray(retention, np.float64)
  if not shape:
    return retention
  grid, means = zip(*shape, strict=True)
  return np.interp(retention, (0.0, *grid, 1.0), (0.0, *means, 1.0))
