"""Calibration from measurements."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Float

from kvjax.calibration.conformal import add_promises
from kvjax.calibration.features import SINGLE
from kvjax.calibration.fields import Preset
from kvjax.calibration.fitting import PAPER, Fit, Rule, fit
from kvjax.calibration.measured import Triples
from kvjax.calibration.record import Calibration
from kvjax.calibration.rules import choose, cross_validate, folds, r2_by_task
from kvjax.calibration.shape import shaped
from kvjax.errors import InputError


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
  token_weights: tuple[tuple[int, float], ...] = (),
) -> Calibration:
  """Fits a calibration.

  Preset "prefill" chooses the features, and how far they tell contexts apart,
  by R2 on held-out contexts, and fits by least squares. There, qualities above
  1 count as 1. Preset "paper" fits Compactor's two parameters with its
  asymmetric loss, and promises nothing. Preset "recite" fits nothing: what is
  recited stands for the quality, capped as well, and only the promises are
  found.

  Args:
    triples: measured with the model and the method.
    model_id: identifies the weights: a name or a digest.
    method: a method, or the label of a plan (`kvjax.Plan.prompt_label`).
    per_query_head: whether each query head selected its own tokens.
    preset: the rule; see `Calibration`.
    others: measurements of other contexts at the same retentions. They tell R2
      and, except for preset "paper", the promises. Without them, both are
      cross-validated, or unknown for a single context; those of preset "recite"
      are then of the fitted contexts.
    data: the measured tasks and texts in words.
    seed: seed of the measured samples.
    token_weights: for preset "recite", the weights that it was measured with;
      see `Calibration`.

  Raises:
    InputError: see `fit`, `choose` and `add_promises`; for preset "recite",
      nothing is measured that was recited.

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
  if preset != "paper":
    triples = triples.capped
    others = None if others is None else others.capped
  record = functools.partial(
    Calibration,
    model_id=model_id,
    method=str(method),
    per_query_head=per_query_head,
    tau_range=(
      min(float(triples.ratio.min()), 1.0),
      min(float(triples.ratio.max()), 1.0),
    ),
    triples=len(triples.ratio),
    preset=preset,
    grid=tuple(np.unique(triples.retention).tolist()),
    data=data,
    seed=seed,
  )
  if preset == "recite":
    return _reciting(record, triples, others, token_weights)
  return _fitted(record, triples, others, preset)


def _fitted(
  record: Callable[..., Calibration],
  triples: Triples,
  others: Triples | None,
  preset: Preset,
) -> Calibration:
  """Fits a curve, and adds its promises.

  Args:
    record: makes the calibration of its other fields.
    triples: see `calibrate`.
    others: likewise.
    preset: the rule, "paper" or "prefill".
  """
  rule = PAPER if preset == "paper" else choose(triples)
  fitted = fit(triples, rule)
  r2: tuple[tuple[str, float], ...] = ()
  several = len(np.unique(triples.contexts)) > 1
  if others is not None:
    r2 = r2_by_task(fitted.predict(others), others)
  elif several:
    r2 = r2_by_task(cross_validate(triples, rule), triples)
  calibration = record(
    alpha=fitted.alpha,
    beta=fitted.beta,
    error=fitted.error,
    slopes=fitted.slopes,
    ranges=_ranges(SINGLE, triples, others),
    shape=_at(fitted, np.unique(triples.retention)),
    r2=r2,
  )
  # Promises need contexts that the curve was not fitted to.
  if preset == "paper" or (others is None and not several):
    return calibration
  if others is not None:
    return add_promises(calibration, [(calibration, others)])
  return add_promises(calibration, list(_folds(calibration, triples, rule)))


def _reciting(
  record: Callable[..., Calibration],
  triples: Triples,
  others: Triples | None,
  token_weights: tuple[tuple[int, float], ...],
) -> Calibration:
  """Takes what is recited for the quality, and adds what that promises.

  Arguments are those of `_fitted` and `calibrate`.
  """
  tested = triples if others is None else others
  if triples.recited is None or tested.recited is None:
    raise InputError(
      'Preset "recite" needs triples with what was recited; measure it with '
      "kvjax.recited."
    )
  calibration = record(
    alpha=0.0,
    beta=0.0,
    error=float(np.sqrt(np.mean((triples.recited - triples.ratio) ** 2))),
    ranges=_ranges(("length",), triples, others),
    r2=r2_by_task(tested.recited, tested),
    token_weights=token_weights,
  )
  return add_promises(calibration, [(calibration, tested)])


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
  names: Sequence[str], *measured: Triples | None
) -> tuple[tuple[str, float, float], ...]:
  """Minimum and maximum of the features that were measured for all triples."""
  ranges = []
  for name in names:
    columns = [getattr(triples, name) for triples in measured if triples]
    if any(column is None for column in columns):
      continue
    values = np.concatenate(columns)
    if np.all(np.isfinite(values)):
      ranges.append((name, float(values.min()), float(values.max())))
  return tuple(ranges)
