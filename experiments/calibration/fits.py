"""Fits calibrations to measurements and summarizes them."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

import kvjax
from kvjax.calibration.features import OF_SCORES
from kvjax.calibration.fields import Preset
from kvjax.experiments.calibration.measuring import Measurement
from kvjax.experiments.run import intervals, method_files
from kvjax.experiments.run.candidates import Candidate

PAPER: Preset = "paper"
PREFILL: Preset = "prefill"
RECITE: Preset = "recite"


class Sets(NamedTuple):
  """Measurements of three sets of contexts.

  Attributes:
    triples: those that curves are fitted to.
    others: those that tell what the curves leave; empty for rule "paper".
    held_out: those that evaluate the records.
  """

  triples: Sequence[Measurement]
  others: Sequence[Measurement]
  held_out: Sequence[Measurement]

  def of(self, method: str) -> "Sets":
    """Selects the measurements of a method."""
    return Sets(*([m for m in part if m.method == method] for part in self))


class Origin(NamedTuple):
  """Where measurements come from.

  Attributes:
    model_id: digest of the measured model.
    data: tasks and texts in words.
    seed: seed of the samples.
  """

  model_id: str
  data: str
  seed: int


@dataclasses.dataclass(frozen=True)
class Fitted:
  """A method's calibration and its measurements.

  Attributes:
    name: name of the method as the user wrote it.
    plan: its plan.
    calibration: the fitted calibration.
    sets: its measurements at fixed retentions.
    reached: held-out contexts at the calibration's retentions, if these are not
      among the fixed ones.
  """

  name: str
  plan: kvjax.Plan
  calibration: kvjax.Calibration
  sets: Sets
  reached: Sequence[Measurement] = ()

  def automatic(self, tau: float) -> Candidate:
    """Returns the method with its calibrated budget."""
    budget = kvjax.Calibrated(self.calibration, tau)
    return Candidate(self.name, dataclasses.replace(self.plan, budget=budget))

  def ratio(self, measurement: Measurement) -> float:
    """Returns the quality that the rule is fitted to."""
    return ratio(self.calibration.preset, measurement)

  def reached_at(self, tau: float) -> list[Measurement]:
    """Returns the held-out contexts at the calibration's retentions."""
    if self.calibration.preset == PAPER:
      return list(self.reached)
    budget = kvjax.Calibrated(self.calibration, tau)
    result = []
    for of_context in _groups(self.sets.held_out).values():
      (share,) = budget.retentions(of_one(of_context))
      result.append(_at(of_context, float(share)))
    return result

  def needed_at(self, tau: float) -> list[Measurement]:
    """Returns the held-out contexts at the least retention that leaves tau.

    It is the least of the measured retentions, or the whole context.
    """
    result = []
    for of_context in _groups(self.sets.held_out).values():
      enough = [m.retention for m in of_context if self.ratio(m) >= tau]
      result.append(_at(of_context, min(enough, default=1.0)))
    return result

  def row(self, tau: float) -> dict[str, Any]:
    """Builds its row of a summary, without single measurements."""
    record = dataclasses.asdict(self.calibration)
    reached, needed = self.reached_at(tau), self.needed_at(tau)
    return {
      "method": self.name,
      "options": record.pop("method"),
      **record,
      "measured": {
        f"{share:g}": round(ratio, 4)
        for share, ratio in self.mean_ratios(self.sets.triples)
      },
      "asked": self.calibration.curve_target(tau),
      "held_out": self._means(reached, needed),
      "tasks": {
        task: self._means(
          [m for m in reached if m.task == task],
          [m for m in needed if m.task == task],
        )
        for task in dict.fromkeys(m.task for m in reached)
      },
    }

  def mean_ratios(
    self, measurements: Sequence[Measurement]
  ) -> list[tuple[float, float]]:
    """Computes the mean quality at each retention, ascending."""
    return [
      (
        share,
        statistics.fmean(
          self.ratio(m) for m in measurements if m.retention == share
        ),
      )
      for share in sorted({m.retention for m in measurements})
    ]

  def _means(
    self, reached: Sequence[Measurement], needed: Sequence[Measurement]
  ) -> dict[str, Any]:
    """Averages contexts at the calibration's retentions and the least ones."""
    mean = statistics.fmean
    # LagKV keeps more than its retention says, so that shares are compared.
    kept, least = (
      mean(m.kept_tokens / m.context_tokens for m in measured)
      for measured in (reached, needed)
    )
    means = {
      "nll": mean(m.nll for m in reached),
      "retention": mean(m.retention for m in reached),
      "kept": kept,
      "needed": least,
      "times": kept / least,
      "ratio": mean(map(self.ratio, reached)),
      # Ratios above 1 do not make up for answers that were lost.
      "capped": mean(min(self.ratio(m), 1.0) for m in reached),
      "nll_ratio": mean(m.nll_ratio for m in reached),
      "samples": len(reached),
    }
    rounded = {name: round(value, 4) for name, value in means.items()}
    return rounded | {"intervals": self._intervals(reached, needed)}

  def _intervals(
    self, reached: Sequence[Measurement], needed: Sequence[Measurement]
  ) -> dict[str, list[float]]:
    """Computes 95 % intervals of two of the means; see `run.intervals`."""
    shares: dict[str, list[tuple[float, float]]] = {}
    qualities: dict[str, list[float]] = {}
    for one, least in zip(reached, needed, strict=True):
      kept, enough = (m.kept_tokens / m.context_tokens for m in (one, least))
      shares.setdefault(one.task, []).append((kept, enough))
      qualities.setdefault(one.task, []).append(100 * min(self.ratio(one), 1.0))
    low, high = intervals.of_scores(qualities)
    found = {
      "times": intervals.of_ratio(shares),
      "capped": (low / 100, high / 100),
    }
    return {
      name: [round(end, 4) for end in ends] for name, ends in found.items()
    }


def ratio(preset: Preset, measurement: Measurement) -> float:
  """Returns the quality of a measurement that a rule is fitted to."""
  if preset == PAPER:
    return measurement.nll_ratio
  return measurement.likelihood_ratio


def fit(
  chosen: Sequence[Candidate],
  sets: Sets,
  preset: Preset,
  origin: Origin,
  token_weights: tuple[tuple[int, float], ...] = (),
) -> list[Fitted]:
  """Fits a calibration for each method, in order; see `kvjax.calibrate`."""
  fitted = []
  for name, plan in {c.method: c.plan for c in chosen}.items():
    of_method = sets.of(name)
    others = of_method.others
    calibration = kvjax.calibrate(
      triples(preset, of_method.triples),
      model_id=origin.model_id,
      method=plan.label,
      per_query_head=plan.per_query_head,
      preset=preset,
      others=triples(preset, others) if others else None,
      data=origin.data,
      seed=origin.seed,
      token_weights=token_weights,
    )
    files = method_files.joined(plan)
    calibration = dataclasses.replace(calibration, method_files=files)
    fitted.append(Fitted(name, plan, calibration, of_method))
  return fitted


def add_reached(
  fitted: Sequence[Fitted], measurements: Sequence[Measurement]
) -> list[Fitted]:
  """Adds measurements at the calibrations' own retentions."""
  return [
    dataclasses.replace(
      method, reached=[m for m in measurements if m.method == method.name]
    )
    for method in fitted
  ]


def triples(
  preset: Preset, measurements: Sequence[Measurement]
) -> kvjax.Triples:
  """Converts the measurements of a method to triples."""
  numbers = {key: n for n, key in enumerate(_groups(measurements))}
  return kvjax.Triples(
    np.array([m.retention for m in measurements]),
    np.array([m.nll for m in measurements]),
    np.array([ratio(preset, m) for m in measurements]),
    np.array([m.context_tokens for m in measurements]),
    np.array([m.tail_nll for m in measurements]),
    context=np.array([numbers[_context(m)] for m in measurements]),
    task=[m.task for m in measurements],
    evicts=np.array([m.kept_tokens < m.context_tokens for m in measurements]),
    **{name: _column(measurements, name) for name in (*OF_SCORES, "recited")},
  )


def features(measurements: Sequence[Measurement]) -> kvjax.Features:
  """Returns what the prefill told about the contexts of measurements."""
  return kvjax.Features(
    np.array([m.nll for m in measurements]),
    np.array([m.context_tokens for m in measurements]),
    np.array([m.tail_nll for m in measurements]),
    *(
      np.array([getattr(m, name) for m in measurements], np.float64)
      for name in OF_SCORES
    ),
  )


def of_one(of_context: Sequence[Measurement]) -> kvjax.Features:
  """Returns what is known about a context from all of its measurements."""
  ascending = sorted(of_context, key=lambda m: m.retention)
  recited = _column(ascending, "recited")
  return features(of_context[:1])._replace(
    recited=None if recited is None else recited[None]
  )


def _column(
  measurements: Sequence[Measurement], name: str
) -> Float[np.ndarray, " M"] | None:
  """Returns a feature of all measurements; None if one lacks it."""
  known = [getattr(m, name) for m in measurements]
  return None if None in known else np.array(known)


def _groups(
  measurements: Sequence[Measurement],
) -> dict[tuple[str, int, str], list[Measurement]]:
  """Groups measurements by context, in order."""
  groups: dict[tuple[str, int, str], list[Measurement]] = {}
  for measurement in measurements:
    groups.setdefault(_context(measurement), []).append(measurement)
  return groups


def _context(measurement: Measurement) -> tuple[str, int, str]:
  return measurement.task, measurement.length, measurement.asked


def _at(of_context: Sequence[Measurement], share: float) -> Measurement:
  """Returns the measurement of a context at a retention, which may be 1."""
  whole = dataclasses.replace(
    of_context[0],
    budget="1",
    retention=1.0,
    kept_tokens=float(of_context[0].context_tokens),
    kept=of_context[0].full,
  )
  return next(m for m in (*of_context, whole) if m.retention == share)
