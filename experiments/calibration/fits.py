"""Fits calibrations to measurements and summarizes them."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvjax
from kvjax.calibration.fitting import promises
from kvjax.experiments.calibration.measuring import Measurement
from kvjax.experiments.candidates import Candidate


@dataclasses.dataclass(frozen=True)
class Fitted:
  """A method's calibration and its measurements.

  Attributes:
    name: name of the method as the user wrote it.
    plan: its plan.
    calibration: the fitted calibration.
    measured: measurements at fixed retentions.
    tried: measurements of other contexts at the curve's retentions.
    held_out: measurements of further contexts at the calibration's retentions.
  """

  name: str
  plan: kvjax.Plan
  calibration: kvjax.Calibration
  measured: Sequence[Measurement]
  tried: Sequence[Measurement] = ()
  held_out: Sequence[Measurement] = ()

  def automatic(self, tau: float) -> Candidate:
    """Returns the method with its calibrated budget."""
    budget = kvjax.Calibrated(self.calibration, tau)
    return Candidate(self.name, dataclasses.replace(self.plan, budget=budget))

  def tried_at(self, asked: float) -> list[Measurement]:
    """Selects the tried measurements for a requested quality."""
    budget = self.automatic(asked).budget
    return [m for m in self.tried if m.budget == budget]

  def row(self, tau: float) -> dict[str, Any]:
    """Builds its row of a summary, without single measurements."""
    record = dataclasses.asdict(self.calibration)
    return {
      "method": self.name,
      "options": record.pop("method"),
      **record,
      "measured": {
        f"{share:g}": round(ratio, 4)
        for share, ratio in mean_ratios(self.measured)
      },
      "tried": {
        f"{asked:g}": round(_ratio(self.tried_at(asked)), 4)
        for asked, _ in self.calibration.promises
      },
      "asked": self.calibration.curve_target(tau),
      "held_out": _means(self.held_out),
      "tasks": {
        task: _means([m for m in self.held_out if m.task == task])
        for task in dict.fromkeys(m.task for m in self.held_out)
      },
    }


def fit(
  chosen: Sequence[Candidate],
  measurements: Sequence[Measurement],
  model_id: str,
) -> list[Fitted]:
  """Fits a calibration for each method, in order.

  Args:
    chosen: methods and fixed retentions.
    measurements: their measurements.
    model_id: digest of the measured model.
  """
  fitted = []
  for name, plan in {c.method: c.plan for c in chosen}.items():
    of_method = [m for m in measurements if m.method == name]
    triples = kvjax.Triples(
      np.array([m.retention for m in of_method]),
      np.array([m.nll for m in of_method]),
      np.array([m.ratio for m in of_method]),
    )
    calibration = kvjax.calibrate(
      triples,
      model_id=model_id,
      method=plan.label,
      per_query_head=plan.per_query_head,
    )
    fitted.append(Fitted(name, plan, calibration, of_method))
  return fitted


def add_promises(
  fitted: Sequence[Fitted],
  asked: Sequence[float],
  measurements: Sequence[Measurement],
) -> list[Fitted]:
  """Adds the promises that the curves keep on other contexts.

  Args:
    fitted: methods and their curves.
    asked: requested qualities, ascending.
    measurements: measurements of each method at the curve's retentions for
      these qualities, on contexts that were not part of the fit.
  """
  result = []
  for method in fitted:
    of_method = [m for m in measurements if m.method == method.name]
    method = dataclasses.replace(method, tried=of_method)
    tried = [method.tried_at(quality) for quality in asked]
    kept = promises(
      asked,
      np.array([[m.ratio for m in group] for group in tried]),
      np.array([[m.kept_tokens < m.context_tokens for m in s] for s in tried]),
    )
    line = dataclasses.replace(method.calibration, promises=kept)
    result.append(dataclasses.replace(method, calibration=line))
  return result


def mean_ratios(
  measurements: Sequence[Measurement],
) -> list[tuple[float, float]]:
  """Computes the mean ratio of measurements at each retention, ascending."""
  return [
    (share, _ratio([m for m in measurements if m.retention == share]))
    for share in sorted({m.retention for m in measurements})
  ]


def _ratio(measurements: Sequence[Measurement]) -> float:
  return statistics.fmean(m.ratio for m in measurements)


def _means(measurements: Sequence[Measurement]) -> dict[str, float]:
  """Averages a method's measurements at its calibrated retention."""
  shares = [m.kept_tokens / m.context_tokens for m in measurements]
  means = {
    "nll": statistics.fmean(m.nll for m in measurements),
    "retention": statistics.fmean(m.retention for m in measurements),
    "kept": statistics.fmean(shares),
    "ratio": _ratio(measurements),
    "samples": len(measurements),
  }
  return {name: round(value, 4) for name, value in means.items()}
