"""The quality that contexts keep on average, which other contexts promise."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from kvjax.calibration.measured import Triples
from kvjax.calibration.record import Calibration
from kvjax.errors import InputError

# Targets of a curve that are tested, from 1e-3 to 1 - 1e-6, denser at the ends:
# contexts that are easy to compress reach the highest retention only there.
TARGETS: tuple[float, ...] = tuple(
  (1 / (1 + np.exp(-np.linspace(-7.0, 14.0, 841)))).tolist()
)


def promises(
  targets: Sequence[float],
  ratios: Float[np.ndarray, "Q M"],
  evicts: Bool[np.ndarray, "Q M"],
) -> tuple[tuple[float, float], ...]:
  """Lower bounds of the mean quality of contexts for each target of a curve.

  A curve may over- or underestimate quality. Therefore contexts that it was not
  fitted to are compressed to what it predicts for a target. With their
  qualities q, at most 1, the promise is sum(q) / (n + 1), as if one more
  context had lost everything. For any tau, use the smallest target with a
  promise of at least tau, or keep everything if there is none. The mean quality
  of contexts from the same distribution is then at least tau, however wrong the
  curve is.

  Source: Theorem 1 of conformal risk control, Angelopoulos et al., arXiv
  2208.02814, with losses 1 - q of at most 1. It requires losses that never rise
  with the target. Therefore a context's quality is replaced by its minimum over
  all higher targets. A context that is too short to evict any token has the
  quality of the previous target.

  Args:
    targets: qualities below 1, ascending.
    ratios: quality of each context at each target.
    evicts: whether at least one token was evicted.

  Returns:
    Pairs of a target and its promise.
  """
  # A context that never loses a token counts as lost, which is safe.
  kept = np.zeros(ratios.shape[1])
  kept_by_target = []
  for ratio, any_evicted in zip(ratios, evicts, strict=True):
    kept = np.where(any_evicted, np.minimum(ratio, 1.0), kept)
    kept_by_target.append(kept)
  least = np.minimum.accumulate(kept_by_target[::-1])[::-1]
  means = least.sum(axis=1) / (least.shape[1] + 1)
  return tuple(zip(targets, means.tolist(), strict=True))


def add_promises(
  calibration: Calibration, tests: Sequence[tuple[Calibration, Triples]]
) -> Calibration:
  """Adds what a rule promises for a fine grid of targets.

  Except for preset "paper", its retentions are measured ones, so that contexts
  which were measured at all of them tell the quality at every target without
  being measured again. Targets that promise no more than a lower one are left
  out.

  Args:
    calibration: the rule.
    tests: pairs of a rule and measurements, at the retentions of the grid, of
      contexts that it was not fitted to. For the theorem to hold exactly, the
      curve is `calibration`. In cross-validation, each is fitted to the other
      contexts, and almost equals `calibration`.

  Raises:
    InputError: a context was not measured at exactly these retentions.
  """
  ratios, evicts = zip(*(_test(*pair) for pair in tests), strict=True)
  tested = promises(TARGETS, np.hstack(ratios), np.hstack(evicts))
  # A target is of use only if it promises more than all lower ones.
  # `initial` comes first, so each pair meets the best of the lower targets.
  best = itertools.accumulate((kept for _, kept in tested), max, initial=-1.0)
  useful = tuple(
    pair for pair, before in zip(tested, best, strict=False) if pair[1] > before
  )
  return dataclasses.replace(calibration, promises=useful)


def _test(
  calibration: Calibration, triples: Triples
) -> tuple[Float[np.ndarray, "Q C"], Bool[np.ndarray, "Q C"]]:
  """Returns the quality of contexts, and whether tokens go, at each target."""
  ratios, evicts, recited = _by_retention(calibration, triples)
  first = np.unique(triples.contexts, return_index=True)[1]
  features = triples.select(first).features._replace(recited=recited)
  # These presets' retentions are those of the grid: look up what was measured.
  grid = np.array([*calibration.grid, 1.0])
  contexts = np.arange(len(first))
  places = [
    np.searchsorted(grid, calibration.retentions(features, target))
    for target in TARGETS
  ]
  return (
    np.array([ratios[contexts, place] for place in places]),
    np.array([evicts[contexts, place] for place in places]),
  )


def _by_retention(
  calibration: Calibration, triples: Triples
) -> tuple[
  Float[np.ndarray, "C R"],
  Bool[np.ndarray, "C R"],
  Float[np.ndarray, "C _"] | None,
]:
  """Arranges qualities, whether tokens were evicted, and recitals, by context.

  The last column is the whole context, whose quality is 1; recitals lack it.
  """
  grid = np.array(calibration.grid)
  contexts = np.unique(triples.contexts, return_inverse=True)[1]
  place = np.searchsorted(grid, triples.retention)
  wrong = (place >= len(grid)) | (
    grid[np.minimum(place, len(grid) - 1)] != triples.retention
  )
  shape = (int(contexts.max()) + 1, len(grid))
  if np.any(wrong) or len(place) != shape[0] * shape[1]:
    raise InputError(
      "Promises need contexts that were each measured once at "
      f"{', '.join(f'{r:g}' for r in grid)}, as those of the curve were."
    )
  ratios = np.full((shape[0], shape[1] + 1), np.nan)
  evicts = np.ones(ratios.shape, bool)
  ratios[contexts, place] = triples.ratio
  ratios[:, -1] = 1.0
  if triples.evicts is not None:
    evicts[contexts, place] = triples.evicts
  if np.any(np.isnan(ratios)):
    raise InputError(
      "Every context must be measured once at each retention; one was measured "
      "twice."
    )
  if triples.recited is None:
    return ratios, evicts, None
  recited = np.empty(shape)
  recited[contexts, place] = triples.recited
  return ratios, evicts, recited
