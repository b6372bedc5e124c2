"""Curves through what was measured, and what they come to."""

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
  """A method's calibration and what it rests on.

  Attributes:
    name: of the method, as the user gave it.
    plan: what it stands for.
    calibration: fitted to the measurements.
    measured: at fixed retentions.
    tried: of other contexts, at what the curve by itself says.
    held_out: of yet others, at what the calibration allows them.
  """

  name: str
  plan: kvjax.Plan
  calibration: kvjax.Calibration
  measured: Sequence[Measurement]
  tried: Sequence[Measurement] = ()
  held_out: Sequence[Measurement] = ()

  def automatic(self, tau: float) -> Candidate:
    """The method at what its calibration allows."""
    budget = kvjax.Calibrated(self.calibration, tau)
    return Candidate(self.name, dataclasses.replace(self.plan, budget=budget))

  def tried_at(self, asked: float) -> list[Measurement]:
    """Those of the contexts that a curve was asked for a quality of."""
    budget = self.automatic(asked).budget
    return [m for m in self.tried if m.budget == budget]

  def row(self, tau: float) -> dict[str, Any]:
    """What a summary holds of it; without the single measurements."""
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
  chosen: Sequence[Candidate], found: Sequence[Measurement], model_id: str
) -> list[Fitted]:
  """A calibration for each method, in order.

  Args:
    chosen: methods and fixed retentions.
    found: what was measured of them.
    model_id: of the model that was measured.
  """
  fitted = []
  for name, plan in {c.method: c.plan for c in chosen}.items():
    own = [measurement for measurement in found if measurement.method == name]
    triples = kvjax.Triples(
      np.array([m.retention for m in own]),
      np.array([m.nll for m in own]),
      np.array([m.ratio for m in own]),
    )
    calibration = kvjax.calibrate(
      triples,
      model_id=model_id,
      method=plan.label,
      per_query_head=plan.per_query_head,
    )
    fitted.append(Fitted(name, plan, calibration, own))
  return fitted


def promised(
  fitted: Sequence[Fitted],
  asked: Sequence[float],
  found: Sequence[Measurement],
) -> list[Fitted]:
  """The same, knowing what their curves are worth.

  Args:
    fitted: methods and their curves.
    asked: qualities, ascending.
    found: what was measured of each method where its curve is asked for them,
      of contexts that it was not fitted to.
  """
  made = []
  for method in fitted:
    own = [m for m in found if m.method == method.name]
    method = dataclasses.replace(method, tried=own)
    tried = [method.tried_at(quality) for quality in asked]
    kept = promises(
      asked,
      np.array([[m.ratio for m in some] for some in tried]),
      np.array([[m.kept_tokens < m.context_tokens for m in s] for s in tried]),
    )
    line = dataclasses.replace(method.calibration, promises=kept)
    made.append(dataclasses.replace(method, calibration=line))
  return made


def mean_ratios(found: Sequence[Measurement]) -> list[tuple[float, float]]:
  """Retentions, ascending, and the mean ratio of measurements at each."""
  return [
    (share, _ratio([m for m in found if m.retention == share]))
    for share in sorted({m.retention for m in found})
  ]


def _ratio(found: Sequence[Measurement]) -> float:
  return statistics.fmean(m.ratio for m in found)


def _means(found: Sequence[Measurement]) -> dict[str, float]:
  """Of a method's measurements at its calibrated retention."""
  shares = [m.kept_tokens / m.context_tokens for m in found]
  means = {
    "nll": statistics.fmean(m.nll for m in found),
    "retention": statistics.fmean(m.retention for m in found),
    "kept": statistics.fmean(shares),
    "ratio": _ratio(found),
    "samples": len(found),
  }
  return {name: round(value, 4) for name, value in means.items()}
