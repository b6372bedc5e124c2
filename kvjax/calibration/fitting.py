"""Fitting of curves to measurements of quality and retention."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from kvjax.calibration.curve import quality
from kvjax.calibration.features import NAMES, Features
from kvjax.errors import InputError

_FLOOR = 1e-3
_MOST = 1.5
# Range of the bisection for kc: beyond it the curves are step functions.
_BEND = 60.0
_HALVINGS = 50
_STEPS = 300
_FLAT = 1e-9
# Initial alpha and beta, in addition to those of the regression.
_STARTS = ((0.0, -3.0), (1.0, -5.0))

# The intercept, a slope for each of `NAMES`, and the logarithm of the power.
_Weights = Float[Array, " W"]
# Number of steps, weights, the solver's state, and whether it is still steep.
_Carry = tuple[Int[Array, ""], _Weights, Any, Bool[Array, ""]]


class Triples(NamedTuple):
  """Measurements, one element per context and retention.

  Attributes:
    retention: r, above 0 and below 1.
    nll: NLL(c) of the whole context, in nats.
    ratio: y, the remaining quality; see `nll_ratio` and `likelihood_ratio`.
    length: tokens of the context; None if unknown.
    tail_nll: see `Features`; None if not measured.
    concentration: see `Features`; None if not measured.
    context: number of the context, so that those of one context can be told;
      None if every triple is one of its own.
    task: name of the task of the context; None for one task.
    evicts: whether at least one token was evicted; None for all.
  """

  retention: Float[np.ndarray, " M"]
  nll: Float[np.ndarray, " M"]
  ratio: Float[np.ndarray, " M"]
  length: Int[np.ndarray, " M"] | None = None
  tail_nll: Float[np.ndarray, " M"] | None = None
  concentration: Float[np.ndarray, " M"] | None = None
  context: Int[np.ndarray, " M"] | None = None
  task: Sequence[str] | np.ndarray | None = None
  evicts: Bool[np.ndarray, " M"] | None = None

  def select(
    self, chosen: Bool[np.ndarray, " M"] | Int[np.ndarray, " Z"]
  ) -> "Triples":
    """Returns some of the triples."""
    return self._replace(
      **{
        name: np.array(field)[chosen]
        for name, field in self._asdict().items()
        if field is not None
      }
    )

  @property
  def contexts(self) -> Int[np.ndarray, " M"]:
    """Number of the context of each triple."""
    if self.context is None:
      return np.arange(len(self.ratio))
    return np.asarray(self.context)

  @property
  def features(self) -> Features:
    """Features of the context of each triple."""
    length = self.length
    if length is None:
      # So long that no retention is less than a token.
      length = np.full(len(self.nll), np.iinfo(np.int64).max)
    return Features(self.nll, length, self.tail_nll, self.concentration)

  @property
  def known_features(self) -> tuple[str, ...]:
    """Those of `NAMES` that were measured for all triples."""
    features = self.features
    measured = {name: features.column(name) for name in NAMES}
    if self.length is None:
      del measured["log_length"]
    return tuple(
      name for name, column in measured.items() if np.all(np.isfinite(column))
    )


class Rule(NamedTuple):
  """The form of a curve, whose numbers are fitted.

  Attributes:
    features: names of the features that kc is linear in; see `NAMES`.
    powered: whether the power of the retention is fitted, otherwise 1.
    too_high: weight of the squared error where the curve is too high; 1 is the
      least-squares fit.
    ridge: weight of the squared slopes of standardized features, which keeps
      few contexts from determining steep ones.
  """

  features: tuple[str, ...]
  powered: bool
  too_high: float
  ridge: float = 0.0


# The paper requires an asymmetry and does not specify it. Overestimated quality
# costs answers; underestimated quality only memory.
PAPER = Rule(("nll",), powered=False, too_high=4.0)


class Fit(NamedTuple):
  """The curve f(r^power, kc), kc = alpha NLL(c) + beta + slopes, and its error.

  Attributes:
    alpha: slope of NLL(c), per nat.
    beta: intercept.
    error: root mean square of f - y.
    slopes: pairs of a further feature and its slope.
    power: exponent of the retention.
  """

  alpha: float
  beta: float
  error: float
  slopes: tuple[tuple[str, float], ...] = ()
  power: float = 1.0

  def predict(self, triples: Triples) -> Float[np.ndarray, " M"]:
    """Computes f at the retentions and features of triples, in float64."""
    features = triples.features
    kc = self.alpha * features.column("nll") + self.beta
    for name, slope in self.slopes:
      kc = kc + slope * features.column(name)
    with jax.enable_x64(True):
      retention = jnp.asarray(triples.retention, jnp.float64) ** self.power
      return np.asarray(quality(retention, jnp.asarray(kc, jnp.float64)))


def nll_ratio(
  full: Float[np.ndarray, "*M"], kept: Float[np.ndarray, "*M"]
) -> Float[np.ndarray, "*M"]:
  """Computes the ratio of an answer's NLL with full and compressed context.

  It is 1 if compression does not change the likelihood, and smaller if the
  answer becomes less likely. This is the paper's quality; 0.001 nats are added
  to both, and the ratio is at most 1.5. For answers that a model is sure of
  (NLL below 0.001), these 0.001 nats decide the ratio.

  Source: Chari and Van Durme, arXiv 2507.08143, Section 3.4.

  Args:
    full: NLL per token of an answer, in nats, given the full context.
    kept: NLL per token of the same answer, given the compressed context.

  Examples:
    >>> import numpy as np
    >>> import kvjax
    >>> full, kept = np.array([1.0, 1.0]), np.array([1.0, 2.0])
    >>> kvjax.nll_ratio(full, kept).round(2).tolist()
    [1.0, 0.5]
  """
  full, kept = np.asarray(full, np.float64), np.asarray(kept, np.float64)
  return np.clip((full + _FLOOR) / (kept + _FLOOR), 0.0, _MOST)


def likelihood_ratio(
  full: Float[np.ndarray, "*M"], kept: Float[np.ndarray, "*M"]
) -> Float[np.ndarray, "*M"]:
  """Computes how likely an answer's tokens remain with a compressed context.

  It is exp(full - kept), the ratio of the geometric means of the likelihoods of
  the answer's tokens, at most 1.5. Unlike `nll_ratio`, it needs no floor, and
  an answer that a model is sure of stays near 1 while the model is sure of it.

  Args:
    full: NLL per token of an answer, in nats, given the full context.
    kept: NLL per token of the same answer, given the compressed context.

  Examples:
    >>> import numpy as np
    >>> import kvjax
    >>> full, kept = np.array([1e-5, 1.0]), np.array([1e-2, 2.0])
    >>> kvjax.likelihood_ratio(full, kept).round(2).tolist()
    [0.99, 0.37]
  """
  full, kept = np.asarray(full, np.float64), np.asarray(kept, np.float64)
  return np.minimum(np.exp(full - kept), _MOST)


def asymmetric_loss(
  predicted: Float[Array, " M"],
  ratio: Float[Array, " M"],
  too_high: Float[Array, ""] | float,
  weight: Float[Array, " M"],
) -> Float[Array, ""]:
  """Weighted mean square of e = f - y, times `too_high` where e is above 0."""
  error = predicted - ratio
  asymmetry = jnp.where(error > 0, too_high, 1.0)
  return jnp.sum(weight * asymmetry * error**2) / jnp.sum(weight)


def fit(
  triples: Triples,
  rule: Rule = PAPER,
  weight: Float[np.ndarray, " M"] | None = None,
) -> Fit:
  """Fits the curve of minimum loss by L-BFGS from three starts.

  The starts have alpha and beta (0, -3) and (1, -5), or come from the
  regression on the kc of each single triple. The fit runs in float64 on the
  CPU, because most accelerators lack float64 and the line search stops early in
  float32 where the loss is flat.

  Args:
    triples: the measurements.
    rule: the form of the curve.
    weight: weight of each triple; equal if None.

  Raises:
    InputError: there is no triple, one has a retention that is not between 0
      and 1 or is not finite, or lacks a feature of the rule.
  """
  _check(triples, rule)
  features = triples.features
  # The columns of other features are zero, so that all rules share a program.
  columns = [
    features.column(name)
    if name in rule.features
    else np.zeros_like(triples.nll, np.float64)
    for name in NAMES
  ]
  design = np.stack(columns, axis=1)
  weight = np.ones(len(design)) if weight is None else weight
  center = np.average(design, axis=0, weights=weight)
  spread = np.sqrt(np.average((design - center) ** 2, axis=0, weights=weight))
  # Equal contexts do not determine a slope.
  spread = np.where(spread > 1e-9 * np.maximum(np.abs(center), 1), spread, 0.0)
  # Dividing by infinity makes a column of zeros, and later a slope of 0.
  scale = np.where(spread > 0, spread, np.inf)
  starts = [_standardized(*pair, center, spread) for pair in _STARTS]
  cpu = jax.devices("cpu")[0]
  with (
    jax.enable_x64(True),
    jax.default_device(cpu),
    jax.numpy_dtype_promotion("standard"),  # optax counts in two kinds of int
  ):
    data = (
      (design - center) / scale,
      triples.retention,
      triples.ratio,
      weight,
      np.array(starts),
      rule.too_high,
      float(rule.powered),
      rule.ridge,
    )
    weights, error = jax.device_get(
      _fit(*(jnp.asarray(x, jnp.float64) for x in data))
    )
  slopes = weights[1:-1] / scale
  named = dict(zip(NAMES, slopes.tolist(), strict=True))
  return Fit(
    named["nll"],
    # Back from standardized features.
    float(weights[0] - slopes @ center),
    float(error),
    tuple((name, named[name]) for name in rule.features if name != "nll"),
    float(np.exp(weights[-1])) if rule.powered else 1.0,
  )


def _check(triples: Triples, rule: Rule) -> None:
  if not len(triples.ratio):
    raise InputError("There is nothing to fit; give at least one triple.")
  numbers = (triples.retention, triples.nll, triples.ratio)
  if not all(np.all(np.isfinite(x)) for x in numbers):
    raise InputError("Triples must be finite numbers; some are not.")
  outside = (triples.retention <= 0) | (triples.retention >= 1)
  if np.any(outside):
    raise InputError(
      "The retentions of triples are above 0 and below 1; "
      f"{triples.retention[outside][0]:g} is not."
    )
  unknown = [n for n in rule.features if n not in triples.known_features]
  if unknown:
    raise InputError(
      f"The rule depends on {', '.join(unknown)}, which must be measured for "
      "all triples."
    )


def _standardized(
  alpha: float,
  beta: float,
  center: Float[np.ndarray, " F"],
  spread: Float[np.ndarray, " F"],
) -> Float[np.ndarray, " W"]:
  """Weights of standardized features, with a slope of NLL(c) only."""
  slopes = np.zeros(len(NAMES))
  place = NAMES.index("nll")
  slopes[place] = alpha * spread[place]
  return np.array([beta + alpha * center[place], *slopes, 0.0])


@jax.jit
def _fit(
  design: Float[Array, "M F"],
  retention: Float[Array, " M"],
  ratio: Float[Array, " M"],
  weight: Float[Array, " M"],
  starts: Float[Array, "S W"],
  too_high: Float[Array, ""],
  powered: Float[Array, ""],
  ridge: Float[Array, ""],
) -> tuple[_Weights, Float[Array, ""]]:
  def predict(weights: _Weights) -> Float[Array, " M"]:
    kc = weights[0] + design @ weights[1:-1]
    # `powered` is 0 or 1, an array: rules with and without a power share this.
    return quality(retention ** jnp.exp(powered * weights[-1]), kc)

  def loss(weights: _Weights) -> Float[Array, ""]:
    fitted = asymmetric_loss(predict(weights), ratio, too_high, weight)
    return fitted + ridge * jnp.sum(weights[1:-1] ** 2)

  def minimize(start: _Weights) -> tuple[_Weights, Float[Array, ""]]:
    weights = _minimize(loss, start)
    return weights, loss(weights)

  first = _regress(design, retention, ratio, weight)
  starts = jnp.concatenate([first[None], starts])
  found, losses = jax.lax.map(minimize, starts)
  # argmin would prefer a NaN.
  best = jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
  square = asymmetric_loss(predict(found[best]), ratio, 1.0, weight)
  return found[best], jnp.sqrt(square)


def _regress(
  design: Float[Array, "M F"],
  retention: Float[Array, " M"],
  ratio: Float[Array, " M"],
  weight: Float[Array, " M"],
) -> _Weights:
  """Regresses the kc of each triple, found by bisection, on the features."""

  def halve(
    _: Int[Array, ""], ends: Float[Array, "2 M"]
  ) -> Float[Array, "2 M"]:
    middle = jnp.mean(ends, axis=0)
    # f falls with kc.
    higher = quality(retention, middle) > ratio
    return jnp.stack(
      [jnp.where(higher, middle, ends[0]), jnp.where(higher, ends[1], middle)]
    )

  least = jnp.full_like(ratio, -_BEND)
  ends = jax.lax.fori_loop(0, _HALVINGS, halve, jnp.stack([least, -least]))
  kc = jnp.mean(ends, axis=0)
  columns = jnp.concatenate([jnp.ones_like(kc)[:, None], design], axis=1)
  root = jnp.sqrt(weight)
  # The solution of minimum norm has no slope where a column is zero.
  line = jnp.linalg.lstsq(columns * root[:, None], kc * root)[0]
  return jnp.append(line, 0.0)


def _minimize(
  loss: Callable[[_Weights], Float[Array, ""]], start: _Weights
) -> _Weights:
  solver = optax.lbfgs()
  # The line search has computed both at the new weights already.
  evaluate = optax.value_and_grad_from_state(loss)

  def step(carry: _Carry) -> _Carry:
    count, weights, state, _ = carry
    value, slope = evaluate(weights, state=state)
    change, state = solver.update(
      slope, state, weights, value=value, grad=slope, value_fn=loss
    )
    return count + 1, weights + change, state, jnp.linalg.norm(slope) > _FLAT

  def unfinished(carry: _Carry) -> Bool[Array, ""]:
    count, _, _, steep = carry
    return steep & (count < _STEPS)

  zero = jnp.zeros((), jnp.int32)
  first = (zero, start, solver.init(start), jnp.asarray(True))
  return jax.lax.while_loop(unfinished, step, first)[1]
