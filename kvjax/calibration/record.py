"""Calibrations, which set the retention of each context."""

import dataclasses
import itertools
import json
import math
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import files
from kvjax.errors import InputError
from kvjax.options.bounds import check_choices
from kvjax.options.budgets import Rounding

Path = str | os.PathLike[str]

# For smaller kc, the series of the curve is exact to 1e-9.
_NEAR_ZERO = 1e-4


def quality(
  retention: Float[Array, "*M"], kc: Float[Array, "*M"]
) -> Float[Array, "*M"]:
  """f(r, kc) = expm1(r kc) / expm1(kc): the quality that a retention leaves.

  It increases with r from f(0) = 0 to f(1) = 1. For kc < 0 it is concave, so
  that little quality is lost at first; kc = 0 is the diagonal. All branches and
  their derivatives are finite for every kc.

  Source: Chari and Van Durme, arXiv 2507.08143, Section 3.4.

  Args:
    retention: r, between 0 and 1.
    kc: curvature.
  """
  near_zero = jnp.abs(kc) < _NEAR_ZERO
  negative = jnp.where(near_zero | (kc > 0), -1.0, kc)
  positive = jnp.where(near_zero | (kc < 0), 1.0, kc)
  bent_up = jnp.expm1(retention * negative) / jnp.expm1(negative)
  bent_down = jnp.exp((retention - 1.0) * positive) * (
    jnp.expm1(-retention * positive) / jnp.expm1(-positive)
  )
  series = retention + retention * (retention - 1.0) * kc / 2.0
  return jnp.where(near_zero, series, jnp.where(kc < 0, bent_up, bent_down))


def least_retention(
  tau: float, kc: Float[np.ndarray, "*M"]
) -> Float[np.ndarray, "*M"]:
  """Computes the smallest r with f(r, kc) >= tau, in float64 on the host.

  The paper writes the largest such r, which would always be 1.

  Args:
    tau: target quality, above 0 and at most 1.
    kc: curvature; see `quality`.
  """
  kc = np.asarray(kc, np.float64)
  if tau >= 1:
    return np.ones_like(kc)
  near_zero = np.abs(kc) < _NEAR_ZERO
  negative = np.where(near_zero | (kc > 0), -1.0, kc)
  positive = np.where(near_zero | (kc < 0), 1.0, kc)
  bent_up = np.log1p(tau * np.expm1(negative)) / negative
  bent_down = 1 + np.log(tau + (1 - tau) * np.exp(-positive)) / positive
  series = tau + tau * (1 - tau) * kc / 2
  return np.where(near_zero, series, np.where(kc < 0, bent_up, bent_down))


@dataclasses.dataclass(frozen=True)
class Calibration:
  """A fitted relation between a context's likelihood and its retention.

  For a context c, the curve of `quality` has kc = alpha NLL(c) + beta, where
  NLL(c) is the mean of -ln p over its tokens but the first. A predictable
  context can be compressed more.

  Source: Chari and Van Durme, arXiv 2507.08143, Section 3.4.

  Attributes:
    alpha: slope, per nat.
    beta: intercept.
    model_id: identifies the weights: a name or a digest.
    method: the method with all its options and its allocation
      (`kvjax.Plan.label`).
    per_query_head: whether each query head selects its own tokens.
    tau_range: minimum and maximum quality of the triples, the latter at most 1;
      outside of it the curve is extrapolated.
    error: root mean square of the fitted minus the measured quality.
    triples: number of triples that it was fitted to.
    promises: pairs of a target of the curve, ascending, and of the mean quality
      that contexts then keep, from `kvjax.calibration.fitting.promises`; empty
      if not measured.

  Example:
    >>> import numpy as np
    >>> import kvjax
    >>> calibration = kvjax.Calibration(
    ...   alpha=0.5,
    ...   beta=-3.0,
    ...   model_id="tiny",
    ...   method="KeyDiff",
    ...   per_query_head=False,
    ...   tau_range=(0.2, 1.0),
    ...   error=0.05,
    ...   triples=100,
    ... )
    >>> nll, lengths = np.array([2.0]), np.array([100])
    >>> calibration.retentions(nll, lengths, tau=0.9).round(2).tolist()
    [0.75]
  """

  alpha: float
  beta: float
  model_id: str
  method: str
  per_query_head: bool
  tau_range: tuple[float, float]
  error: float
  triples: int
  promises: tuple[tuple[float, float], ...] = ()

  def __post_init__(self) -> None:
    numbers = (self.alpha, self.beta, *self.tau_range, self.error)
    low, high = self.tau_range
    targets = [0.0, *(pair[0] for pair in self.promises), 1.0]
    if (
      not all(map(math.isfinite, numbers))
      or not 0 <= low <= high <= 1
      or self.error < 0
      or self.triples < 1
      or not all(0 <= kept <= 1 for _, kept in self.promises)
      or not all(a < b for a, b in itertools.pairwise(targets))
    ):
      raise InputError(
        "A calibration has finite numbers, a tau_range and promises within 0 "
        f"and 1, the latter ascending, and at least one triple; {self} has not."
      )

  def check(self, method: object, per_query_head: bool) -> None:
    """Refuses any method but the calibrated one.

    Raises:
      InputError: the method or `per_query_head` differ.
    """
    if (str(method), per_query_head) == (self.method, self.per_query_head):
      return
    names = {True: "each query head", False: "each KV head"}
    raise InputError(
      f"The calibration is that of {self.method} for "
      f"{names[self.per_query_head]}; {method} for {names[per_query_head]} "
      "needs one of its own."
    )

  def retentions(
    self,
    nll: Float[np.ndarray, " B"],
    lengths: Int[np.ndarray, " B"],
    tau: float,
  ) -> Float[np.ndarray, " B"]:
    """Computes the least r with f(r, c) >= tau; 1 for an unknown likelihood.

    Args:
      nll: NLL(c) of each context; not finite for a single token.
      lengths: number of tokens of each context.
      tau: target quality of the curve.
    """
    known = np.isfinite(nll)
    kc = self.alpha * np.where(known, nll, 0.0).astype(np.float64) + self.beta
    least = np.clip(least_retention(tau, kc), 1 / lengths, 1.0)
    return np.where(known, least, 1.0)

  def curve_target(self, tau: float) -> float:
    """Target of the curve with which contexts keep the quality tau on average.

    It is tau if that is sufficient or was not measured, else the smallest
    measured target whose promise is at least tau, else 1, which keeps
    everything.
    """
    if not self.promises:
      return tau
    sufficient = (
      max(target, tau) for target, kept in self.promises if kept >= tau
    )
    return next(sufficient, 1.0)

  def save(self, path: Path) -> None:
    """Writes the record as JSON, atomically.

    Raises:
      InputError: the file cannot be written.
    """
    text = json.dumps(dataclasses.asdict(self), indent=2)
    files.write_text(path, text + "\n")

  @classmethod
  def load(cls, path: Path, *, model_id: str) -> "Calibration":
    """Reads what `save` wrote.

    Args:
      path: the file.
      model_id: identifies the weights that it will be used with.

    Raises:
      InputError: there is no such file, or it is not a calibration of this
        model.
    """
    text = files.read_text(path)
    try:
      saved = files.parse_json(text)
    except ValueError as error:
      raise InputError(
        f"{path} is no JSON; give a file that Calibration.save has written."
      ) from error
    made = cls(**_checked(saved, path))
    if made.model_id != model_id:
      raise InputError(
        f"The calibration {path} is that of the model {made.model_id!r}; "
        f"{model_id!r} needs one of its own."
      )
    return made


def check_tau(tau: float) -> None:
  """Refuses a tau that is not a share of quality.

  Raises:
    InputError: it is not above 0 and at most 1.
  """
  if not 0 < tau <= 1:
    raise InputError(
      "tau is the share of quality that is to be left, above 0 and at most 1; "
      f"{tau:g} is not."
    )


@dataclasses.dataclass(frozen=True)
class Calibrated:
  """A budget that adapts to each prompt so that it keeps the quality tau.

  The budget is a retention r*, as in `Retention`, which is known after the
  forward pass over the prompt. It is the least r with f(r, c) >= tau, or a
  higher one if the calibration knows that its curve overestimates quality. A
  prompt of one token, which has no likelihood, is kept whole.

  Attributes:
    calibration: calibration of the model and the method.
    tau: share of quality to keep, as a ratio of likelihoods; 1 keeps
      everything.
    rounding: how r* of a prompt's tokens are rounded; see `Retention`.

  Example:
    >>> import kvjax
    >>> calibration = kvjax.Calibration(
    ...   alpha=0.5,
    ...   beta=-3.0,
    ...   model_id="tiny",
    ...   method="KeyDiff",
    ...   per_query_head=False,
    ...   tau_range=(0.2, 1.0),
    ...   error=0.05,
    ...   triples=100,
    ... )
    >>> print(kvjax.Calibrated(calibration, tau=0.9))
    auto at 0.9
  """

  calibration: Calibration
  tau: float
  rounding: Rounding = "up"

  def __post_init__(self) -> None:
    check_choices(self)
    check_tau(self.tau)

  def retentions(
    self, nll: Float[np.ndarray, " B"], lengths: Int[np.ndarray, " B"]
  ) -> Float[np.ndarray, " B"]:
    """Computes r* of prompts."""
    target = self.calibration.curve_target(self.tau)
    return self.calibration.retentions(nll, lengths, target)

  def __str__(self) -> str:
    return f"auto at {self.tau:g}"


# A float stands for any number.
_KINDS: dict[str, type] = {
  "alpha": float,
  "beta": float,
  "model_id": str,
  "method": str,
  "per_query_head": bool,
  "tau_range": list,
  "error": float,
  "triples": int,
  "promises": list,
}
_LARGEST = 2**63
# Shown of a wrong value.
_LONGEST = 60


def _checked(saved: Any, path: Path) -> dict[str, Any]:
  """Checks and converts the fields of a saved calibration.

  Raises:
    InputError: one is missing, unknown, or of another kind.
  """
  wrong = ""
  if not isinstance(saved, dict):
    wrong = "it holds no fields"
  elif saved.keys() != _KINDS.keys():
    names = ", ".join(saved)[: 3 * _LONGEST]
    wrong = f"its fields are {names}, not {', '.join(_KINDS)}"
  else:
    for name, kind in _KINDS.items():
      value = saved[name]
      right = _is_number(value) if kind is float else type(value) is kind
      if name == "tau_range":
        right = _is_pair(value)
      elif name == "promises" and right:
        right = all(map(_is_pair, value))
      if not right:
        wrong = f"{name} is {repr(value)[:_LONGEST]}"
  if wrong:
    raise InputError(
      f"{path} is no calibration, for {wrong}; give a file that "
      "Calibration.save has written."
    )
  return saved | {
    "tau_range": tuple(saved["tau_range"]),
    "promises": tuple(map(tuple, saved["promises"])),
  }


def _is_pair(value: Any) -> bool:
  return (
    isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
  )


def _is_number(value: Any) -> bool:
  """Whether a float can represent it; NaN and infinity are refused later."""
  return type(value) is float or (type(value) is int and abs(value) < _LARGEST)
