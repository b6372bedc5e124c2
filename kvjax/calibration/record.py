"""How much of its cache a context can lose: the calibrated retention."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.errors import InputError

Path = str | os.PathLike[str]

# Below this kc the curve is its own series to 1e-9.
_STRAIGHT = 1e-4


def quality(
  retention: Float[Array, "*M"], kc: Float[Array, "*M"]
) -> Float[Array, "*M"]:
  """f(r, kc) = expm1(r kc) / expm1(kc): the quality that a retention leaves.

  It rises with r from f(0) = 0 to f(1) = 1; kc < 0 bends it upwards, so that
  little is lost at first, and kc = 0 is the diagonal. Every branch is finite
  and so are its derivatives, whatever kc is.

  Source: Chari and Van Durme, arXiv 2507.08143, Section 3.4.

  Args:
    retention: r, between 0 and 1.
    kc: how the curve bends.
  """
  straight = jnp.abs(kc) < _STRAIGHT
  below = jnp.where(straight | (kc > 0), -1.0, kc)
  above = jnp.where(straight | (kc < 0), 1.0, kc)
  bent_up = jnp.expm1(retention * below) / jnp.expm1(below)
  bent_down = jnp.exp((retention - 1.0) * above) * (
    jnp.expm1(-retention * above) / jnp.expm1(-above)
  )
  series = retention + retention * (retention - 1.0) * kc / 2.0
  return jnp.where(straight, series, jnp.where(kc < 0, bent_up, bent_down))


def least_retention(
  tau: float, kc: Float[np.ndarray, "*M"]
) -> Float[np.ndarray, "*M"]:
  """The smallest r with f(r, kc) >= tau; float64, on the host.

  The paper writes the largest such r, which would always be 1.

  Args:
    tau: the quality wanted, above 0 and at most 1.
    kc: how the curve bends; see `quality`.
  """
  kc = np.asarray(kc, np.float64)
  if tau >= 1:
    return np.ones_like(kc)
  straight = np.abs(kc) < _STRAIGHT
  below = np.where(straight | (kc > 0), -1.0, kc)
  above = np.where(straight | (kc < 0), 1.0, kc)
  bent_up = np.log1p(tau * np.expm1(below)) / below
  bent_down = 1 + np.log(tau + (1 - tau) * np.exp(-above)) / above
  series = tau + tau * (1 - tau) * kc / 2
  return np.where(straight, series, np.where(kc < 0, bent_up, bent_down))


@dataclasses.dataclass(frozen=True)
class Calibration:
  """What a context's likelihood says about the retention that it can bear.

  A context c bends the curve of `quality` by kc = alpha NLL(c) + beta, where
  NLL(c) is the mean of -ln p over its tokens but the first: what is easily
  foretold can lose much.

  Source: Chari and Van Durme, arXiv 2507.08143, Section 3.4.

  Attributes:
    alpha: per nat.
    beta: the rest.
    model_id: tells the weights from others: a name, a digest.
    method: with all its options and its allocation (`kvjax.Plan.label`).
    per_query_head: whether each query head chooses for itself.
    tau_range: the least and the greatest quality that the triples measured,
      the latter 1 at most; what lies outside is extrapolated.
    error: root mean square of the fitted quality against the measured one.
    triples: how many it was fitted to.
    promises: pairs of a quality that the curve is asked for, ascending, and of
      what contexts then keep on average, as
      `kvjax.calibration.fitting.promises` finds it;
      empty where nobody has looked.
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
    asked = [0.0, *(pair[0] for pair in self.promises), 1.0]
    if (
      not all(map(math.isfinite, numbers))
      or not 0 <= low <= high <= 1
      or self.error < 0
      or self.triples < 1
      or not all(0 <= kept <= 1 for _, kept in self.promises)
      or not all(a < b for a, b in itertools.pairwise(asked))
    ):
      raise InputError(
        "A calibration has finite numbers, a tau_range and promises within 0 "
        f"and 1, the latter ascending, and at least one triple; {self} has not."
      )

  def check(self, method: object, per_query_head: bool) -> None:
    """Refuses to speak for anything but what was calibrated.

    Raises:
      InputError: it is another method, or heads choose in another way.
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
    """The least r with f(r, c) >= tau; 1 where the likelihood is not known.

    Args:
      nll: NLL(c); not finite for a context of one token.
      lengths: tokens.
      tau: the quality asked of the curve.
    """
    known = np.isfinite(nll)
    kc = self.alpha * np.where(known, nll, 0.0).astype(np.float64) + self.beta
    least = np.clip(least_retention(tau, kc), 1 / lengths, 1.0)
    return np.where(known, least, 1.0)

  def asked(self, tau: float) -> float:
    """What to ask of the curve so that contexts keep tau on average.

    That is tau itself where the curve can be taken at its word, or where nobody
    has looked; else the least quality that was tried whose promise is tau or
    more; else 1, which keeps everything.
    """
    if not self.promises:
      return tau
    enough = (max(asked, tau) for asked, kept in self.promises if kept >= tau)
    return next(enough, 1.0)

  def save(self, path: Path) -> None:
    """Writes the record as JSON.

    Raises:
      InputError: the file cannot be written.
    """
    text = json.dumps(dataclasses.asdict(self), indent=2)
    try:
      pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
      raise InputError(
        f"The calibration cannot be written to {path}: {error.strerror}."
      ) from error

  @classmethod
  def load(cls, path: Path, *, model_id: str) -> "Calibration":
    """Reads what `save` wrote.

    Args:
      path: the file.
      model_id: the model's that it is to be used with.

    Raises:
      InputError: there is no such file, it is no such record, or it is another
        model's.
    """
    try:
      saved = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
      raise InputError(
        f"The calibration {path} cannot be read: {error.strerror}."
      ) from error
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
  """Refuses what is no share of quality.

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
  """A budget that each prompt sets for itself: what keeps the quality tau.

  It is a retention r* as `Retention` means it, known when the prompt has been
  read: the least r with f(r, c) >= tau, or a higher one where the calibration
  knows that its curve promises too much. A prompt of one token, of which
  nothing was foretold, is kept whole.

  Attributes:
    calibration: of the model and the method.
    tau: the share of quality that is to be left, by the ratio of likelihoods;
      1 keeps everything.
  """

  calibration: Calibration
  tau: float

  def __post_init__(self) -> None:
    check_tau(self.tau)

  def retentions(
    self, nll: Float[np.ndarray, " B"], lengths: Int[np.ndarray, " B"]
  ) -> Float[np.ndarray, " B"]:
    """r* of prompts; see `Calibration.retentions` and `Calibration.asked`."""
    asked = self.calibration.asked(self.tau)
    return self.calibration.retentions(nll, lengths, asked)

  def __str__(self) -> str:
    return f"auto at {self.tau:g}"


_NUMBER = (int, float)
_KINDS: dict[str, type | tuple[type, ...]] = {
  "alpha": _NUMBER,
  "beta": _NUMBER,
  "model_id": str,
  "method": str,
  "per_query_head": bool,
  "tau_range": list,
  "error": _NUMBER,
  "triples": int,
  "promises": list,
}


def _checked(saved: Any, path: Path) -> dict[str, Any]:
  """The fields of a record as its class wants them.

  Raises:
    InputError: one is missing, unknown, or of another kind.
  """
  wrong = ""
  if not isinstance(saved, dict):
    wrong = "it holds no fields"
  elif saved.keys() != _KINDS.keys():
    wrong = f"its fields are {', '.join(saved)}, not {', '.join(_KINDS)}"
  else:
    for name, kind in _KINDS.items():
      truth = isinstance(saved[name], bool) and kind is not bool
      if truth or not isinstance(saved[name], kind):
        wrong = f"{name} is {saved[name]!r}"
  if not wrong and not _is_pair(saved["tau_range"]):
    wrong = f"tau_range is {saved['tau_range']!r}"
  if not wrong and not all(map(_is_pair, saved["promises"])):
    wrong = f"promises is {saved['promises']!r}"
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
    isinstance(value, list)
    and len(value) == 2
    and all(type(x) in _NUMBER for x in value)
  )
