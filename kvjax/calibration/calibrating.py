"""Calibration from measurements."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from kvjax.calibration.conformal import add_promises
from kvjax.calibration.features import Features
from kvjax.calibration.fields import Preset
from kvjax.calibration.fitting import PAPER, Fit, Rule, fit
from kvjax.calibration.measured import Triples
from kvjax.calibration.record import Calibration
from kvjax.calibration.rules import choose, cross_validate, folds, r2_by_task
from kvjax.calibration.shape import shaped


def calibrate(
  triples: Triples,
  *,
  model_id: str,
  method: object,
  per_query_head: bool = False,
  preset: Preset = "prefill",
  others: Triples | None = None,
  data: str = "",
  seed: int = 0,
) -> Calibration:
  """Fits a calibration.

  Preset "prefill" chooses the features, and how far they tell contexts apart,
  by R2 on held-out contexts, and fits by least squares. There, qualities above
  1 count as 1. Preset "paper" fits Compactor's two parameters with its
  asymmetric loss, and promises nothing.

  Args:
    triples: measured with the model and the method.
    model_id: identifies the weights: a name or a digest.
    method: a method, or the label of a plan (`kvjax.Plan.prompt_label`).
    per_query_head: whether each query head selected its own tokens.
    preset: the rule; see `Calibration`.
    others: measurements of other contexts at the same retentions. They tell R2
      and, for preset "prefill", the promises of the curve. Without them, both
      are cross-validated, or unknown for a single context.
    data: the measured tasks and texts in words.
    seed: seed of the measured samples.

  Raises:
    InputError: see `fit`, `choose` and `add_promises`.

  Examples:
    >>> import numpy as np
    >>> import kvjax
    >>> triples = kvjax.Triples(
    ...   retention=np.array([0.2, 0.5, 0.2, 0.5]),
    ...   nll=np.array([1.0, 1.0, 2.0, 2.0]),
    ...   ratio=np.array([0.5, 0.9, 0.3, 0.7]),
    ... )
    >>> method = kvjax.get_method("keydiff")
    >>> calibration = kvjax.calibrate(
    ...   triples, model_id="tiny", method=method, preset="paper"
    ... )
    >>> calibration.triples
    4
  """
  if preset == "prefill":
    triples = triples.capped
    others = None if others is None else others.capped
  rule = PAPER if preset == "paper" else choose(triples)
  fitted = fit(triples, rule)
  grid = np.unique(triples.retention)
  r2: tuple[tuple[str, float], ...] = ()
  several = len(np.unique(triples.contexts)) > 1
  if others is not None:
    r2 = r2_by_task(fitted.predict(others), others)
  elif several:
    r2 = r2_by_task(cross_validate(triples, rule), triples)
  measured = [x for x in (triples, others) if x is not None]
  calibration = Calibration(
    alpha=fitted.alpha,
    beta=fitted.beta,
    model_id=model_id,
    method=str(method),
    per_query_head=per_query_head,
    tau_range=(
      min(float(triples.ratio.min()), 1.0),
      min(float(triples.ratio.max()), 1.0),
    ),
    error=fitted.error,
    triples=len(triples.ratio),
    preset=preset,
    slopes=fitted.slopes,
    ranges=_ranges(measured),
    grid=tuple(grid.tolist()),
    shape=_at(fitted, grid),
    r2=r2,
    data=data,
    seed=seed,
  )
  # Promises need contexts that the curve was not fitted to.
  if preset == "paper" or (others is None and not several):
    return calibration
  if others is not None:
    return add_promises(calibration, [(calibration, others)])
  return add_promises(calibration, list(_folds(calibration, triples, rule)))


def _folds(
  calibration: Calibration, triples: Triples, rule: Rule
) -> Iterator[tuple[Calibration, Triples]]:
  """Yields curves, and the triples of contexts they were not fitted to."""
  for fitted, held_out in folds(triples, rule):
    curve = dataclasses.replace(
      calibration,
      alpha=fitted.alpha,
      beta=fitted.beta,
      slopes=fitted.slopes,
      shape=_at(fitted, np.array(calibration.grid)),
    )
    yield curve, triples.select(held_out)


def _at(fitted: Fit, grid: Float[np.ndarray, " R"]) -> tuple[float, ...]:
  """The shape of a curve at retentions; empty if it has none."""
  if not fitted.shape:
    return ()
  return tuple(shaped(grid, fitted.shape).tolist())


def _ranges(
  measured: Sequence[Triples],
) -> tuple[tuple[str, float, float], ...]:
  """Minimum and maximum of the features that were measured for all triples."""
  ranges = []
  for name in Features._fields:
    columns = [getattr(triples, name) for triples in measured]
    if any(column is None for column in columns):
      continue
    values = np.concatenate(columns)
    if np.all(np.isfinite(values)):
      ranges.append((name, float(values.min()), float(values.max())))
  return tuple(ranges)
