"""Calibrations, which set the retention of each context."""

import dataclasses
import itertools
import json
import math

import numpy as np
from jaxtyping import Float

from kvjax import files
from kvjax.calibration.curve import check_tau, least_retention
from kvjax.calibration.features import NAMES, SINGLE, Features
from kvjax.calibration.fields import PRESETS, Preset, checked, to_json
from kvjax.calibration.ranges import in_range
from kvjax.calibration.reciting import digest, least_reciting
from kvjax.errors import InputError, warn
from kvjax.options.bounds import check_options
from kvjax.options.budgets import Rounding

# A retention this much above a measured one is a rounding error.
_EQUAL = 1e-9


@dataclasses.dataclass(frozen=True)
class Calibration:
  """A fitted relation between what a prefill tells and the retention.

  For a context c, the curve of `quality` has kc = alpha NLL(c) + beta + the sum
  of the slopes times their features. A predictable context can be compressed
  more.

  Preset "paper" is the rule of Compactor: kc = alpha NLL(c) + beta, and the
  retention at which the curve meets tau. A warning says if that is outside the
  measured retentions. Preset "prefill" bends `shape`, the mean quality at each
  measured retention: the retention is the least measured one at which the curve
  of the shape reaches tau, and everything above the highest. It neither
  interpolates nor extrapolates. Where kc is 0 for all contexts, all keep the
  same.

  Features outside their measured ranges are replaced by the nearest value in
  range. A warning says if they are outside by more than a tenth. Except with
  preset "paper", such contexts keep everything: the nearest values together may
  be those of no context at all, and slopes of opposite signs do not cancel.

  Preset "recite" has no curve. The cache of each measured retention recites the
  context (`kvjax.recited`), and the retention is the least one from which on
  all recite at least tau.

  Source: Chari and Van Durme, arXiv 2507.08143, Section 3.4; the shape, the
  further features, the choice among measured retentions and preset "recite" are
  ours.

  Raises InputError if a field is out of range, or is not one of the preset.

  Attributes:
    alpha: slope of NLL(c), per nat.
    beta: intercept.
    model_id: digest of the weights that it was measured with, or a name.
    method: the method with all its options and its allocation
      (`kvjax.Plan.prompt_label`).
    per_query_head: whether each query head selects its own tokens.
    tau_range: minimum and maximum quality of the triples, the latter at most 1.
    error: root mean square of the fitted minus the measured quality.
    triples: number of triples that it was fitted to.
    promises: pairs of a target of the curve, ascending, and of the mean quality
      that contexts then keep, from `kvjax.calibration.conformal.promises`;
      empty if not measured.
    preset: the rule, "paper", "prefill" or "recite".
    slopes: pairs of a further feature of `kvjax.calibration.features.NAMES` and
      its slope.
    ranges: minimum and maximum of measured features, as triples of a field of
      `Features` and two numbers.
    grid: measured retentions, ascending.
    shape: for preset "prefill", the mean quality at each of them, from
      `kvjax.calibration.shape`, never falling; else empty.
    r2: R2 of the curves on contexts that they were not fitted to: pairs of a
      task and its R2, and "all" for all tasks together.
    data: the measured tasks and texts in words.
    seed: seed of the measured samples.
    token_weights: for preset "recite", token ids, ascending, and how much each
      counts in what is recited, at most 1; if empty, all count the same.
    method_files: digests of the files that the method's options name, as
      programs write and compare them; empty if there are none, or if they are
      not known.

  Examples:
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
    >>> features = kvjax.Features(nll=np.array([2.0]), length=np.array([100]))
    >>> calibration.retentions(features, tau=0.9).round(2).tolist()
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
  preset: Preset = "paper"
  slopes: tuple[tuple[str, float], ...] = ()
  ranges: tuple[tuple[str, float, float], ...] = ()
  grid: tuple[float, ...] = ()
  shape: tuple[float, ...] = ()
  r2: tuple[tuple[str, float], ...] = ()
  data: str = ""
  seed: int = 0
  token_weights: tuple[tuple[int, float], ...] = ()
  method_files: str = ""

  def __post_init__(self) -> None:
    numbers = (self.alpha, self.beta, *self.tau_range, self.error)
    further = [value for _, value in (*self.slopes, *self.r2)]
    low, high = self.tau_range
    targets = [0.0, *(pair[0] for pair in self.promises), 1.0]
    if (
      not all(map(math.isfinite, (*numbers, *further)))
      or not 0 <= low <= high <= 1
      or self.error < 0
      or self.triples < 1
      or not all(0 <= kept <= 1 for _, kept in self.promises)
      or not all(a < b for a, b in itertools.pairwise(targets))
    ):
      raise InputError(
        "A calibration must have finite numbers, a tau_range and promises "
        "within 0 and 1, the latter ascending, and at least one triple; that "
        f"of {self.method:.80} does not."
      )
    grid, shape = [0.0, *self.grid, 1.0], [0.0, *self.shape, 1.0]
    if (
      self.preset not in PRESETS
      or not {name for name, _ in self.slopes} <= {*NAMES}
      or not {name for name, *_ in self.ranges} <= {*SINGLE}
      or not all(low <= high for _, low, high in self.ranges)
      or not all(a < b for a, b in itertools.pairwise(grid))
      or not all(a <= b for a, b in itertools.pairwise(shape))
      or (self.preset != "paper" and not self.grid)
      or len(self.shape) != len(self.grid) * (self.preset == "prefill")
    ):
      raise InputError(
        f"A calibration must have one of the presets {', '.join(PRESETS)}, "
        f"slopes of {', '.join(NAMES)}, ranges of {', '.join(SINGLE)}, the "
        "measured retentions ascending within 0 and 1 and, for preset "
        f'"prefill", a shape that never falls; that of {self.method:.80} does '
        "not."
      )
    self._check_reciting()

  def _check_reciting(self) -> None:
    """Refuses a curve with preset "recite", and token weights without it."""
    ids = [-1, *(number for number, _ in self.token_weights)]
    if self.preset == "recite":
      wrong = bool(self.alpha or self.beta or self.slopes)
    else:
      wrong = bool(self.token_weights)
    if (
      wrong
      or not all(a < b for a, b in itertools.pairwise(ids))
      or not all(0 < weight <= 1 for _, weight in self.token_weights)
    ):
      raise InputError(
        'Preset "recite" has no curve, and it alone has token_weights, of '
        f"ascending ids and within 0 and 1; the calibration of "
        f"{self.method:.80} is another."
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

  @property
  def depends_on(self) -> frozenset[str]:
    """Names of the features that retentions depend on."""
    return frozenset({"nll", *(name for name, _ in self.slopes)})

  @property
  def formula(self) -> str:
    """The rule in words, as `kc = 2 NLL - 6 + 0.5 tail_nll`."""
    if self.preset == "recite":
      shares = "+".join(f"{share:g}" for share in self.grid)
      return f"recited at {shares}, weights {digest(self.token_weights)}"
    terms = [(self.alpha, " NLL"), (self.beta, "")]
    terms += [(slope, f" {name}") for name, slope in self.slopes]
    text = "".join(
      f" {'-' if value < 0 else '+'} {abs(value):g}{name}"
      for value, name in terms
    )
    return f"kc ={text.removeprefix(' +')}"

  def curvature(self, features: Features) -> Float[np.ndarray, " B"]:
    """Computes kc of contexts; NaN if a feature is unknown."""
    kc = self.alpha * features.column("nll") + self.beta
    for name, slope in self.slopes:
      kc = kc + slope * features.column(name)
    return kc

  def retentions(
    self, features: Features, tau: float
  ) -> Float[np.ndarray, " B"]:
    """Computes the retention of contexts; 1 if a feature is not finite.

    Args:
      features: what the prefill tells about the contexts.
      tau: target quality of the curve.

    Raises:
      InputError: tau is not above 0 and at most 1.
    """
    check_tau(tau)
    features = self._in_range(features)
    kc = self.curvature(features)
    if self.preset != "recite":
      least = self._least_of_curve(kc, tau)
    elif features.recited is not None:
      least = least_reciting(features.recited, self.grid, tau)
    else:
      least = np.ones(kc.shape)
    # At least one token is kept.
    least = np.clip(least, 1 / np.asarray(features.length), 1.0)
    return np.where(np.isfinite(kc), least, 1.0)

  def _least_of_curve(
    self, kc: Float[np.ndarray, " B"], tau: float
  ) -> Float[np.ndarray, " B"]:
    """The retention at which the curve reaches tau; any if kc is not finite."""
    known = np.isfinite(kc)
    least = least_retention(tau, np.where(known, kc, 0.0))
    if self.preset == "prefill":
      # The curve is one of the shape: find the first value that is as high.
      place = np.searchsorted(self.shape, least - _EQUAL)
      return np.array([*self.grid, 1.0])[place]
    if tau < 1:
      self._warn_of_extrapolation(least[known])
    return least

  def curve_target(self, tau: float) -> float:
    """Target of the curve with which contexts keep the quality tau on average.

    It is the least target whose promise is at least tau, whether lower or
    higher than tau; 1, which keeps everything, if there is none; and tau if no
    promise was measured.
    """
    if not self.promises:
      return tau
    return next((t for t, kept in self.promises if kept >= tau), 1.0)

  def _in_range(self, features: Features) -> Features:
    """Replaces features outside of their ranges by the nearest in range.

    Except with preset "paper", the NLL of contexts that are far outside is NaN.
    """
    inside, far, outside = in_range(features, self.ranges)
    if outside:
      warn(
        f"The calibration of {self.method} was measured on contexts with "
        f"{' and '.join(outside)}; others {self._treated}, so calibrate on "
        "contexts like them."
      )
    if self.preset == "paper":
      return inside
    return inside._replace(nll=np.where(far, np.nan, inside.nll))

  @property
  def _treated(self) -> str:
    """What happens to contexts that are far outside of the ranges."""
    if self.preset == "paper":
      return "are taken for the nearest of these"
    return "keep everything"

  def _warn_of_extrapolation(self, found: Float[np.ndarray, " M"]) -> None:
    if not self.grid:
      return
    low, high = self.grid[0], self.grid[-1]
    outside = found[(found < low - _EQUAL) | (found > high + _EQUAL)]
    if len(outside):
      warn(
        f"The curve of {self.method} gives a retention of {outside[0]:.4g}, "
        f"and was measured from {low:g} to {high:g}; preset prefill does not "
        "extrapolate."
      )

  def save(self, path: files.Path) -> None:
    """Writes the record as JSON, atomically.

    Raises:
      InputError: the file cannot be written.
    """
    text = json.dumps(to_json(dataclasses.asdict(self)), indent=2)
    files.write_text(path, text + "\n")

  @classmethod
  def load(cls, path: files.Path, *, model_id: str) -> "Calibration":
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
    made = cls(**checked(saved, path))
    if made.model_id != model_id:
      raise InputError(
        f"The calibration {path} is that of the model {made.model_id!r}; "
        f"{model_id!r} needs one of its own."
      )
    return made


@dataclasses.dataclass(frozen=True)
class Calibrated:
  """A budget that adapts to each prompt so that it keeps the quality tau.

  The budget is a retention r*, as in `Retention`, which is known after the
  forward pass over the prompt; see `Calibration`. With preset "recite", it
  takes further passes, and prompts with a request to repeat them. If the
  calibration knows what quality its curve leaves on average, the curve is asked
  for as much as that needs. A prompt of one token, which has no likelihood, is
  kept whole.

  Raises InputError if tau is not above 0 and at most 1, or the rounding is
  unknown.

  Attributes:
    calibration: calibration of the model and the method.
    tau: share of quality to keep, as a ratio of likelihoods; 1 keeps
      everything.
    rounding: how r* of a prompt's tokens are rounded; see `Retention`.

  Examples:
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
    check_options(self)
    check_tau(self.tau)

  def retentions(self, features: Features) -> Float[np.ndarray, " B"]:
    """Computes r* of prompts."""
    target = self.calibration.curve_target(self.tau)
    return self.calibration.retentions(features, target)

  def __str__(self) -> str:
    return f"auto at {self.tau:g}"
