"""Fitting of curves to measurements of quality and retention."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import openblas
from kvjax.calibration.curve import quality
from kvjax.calibration.features import NAMES
from kvjax.calibration.measured import Triples
from kvjax.calibration.shape import Shape, mean_quality, shaped
from kvjax.errors import InputError

# Range of the bisection for kc: beyond it the curves are step functions.
_BEND = 60.0
_HALVINGS = 50
_STEPS = 300
_FLAT = 1e-9
# Initial alpha and beta, in addition to those of the regression.
_STARTS = ((0.0, 0.0), (0.0, -3.0), (1.0, -5.0))

# The intercept, and a slope for each of `NAMES`.
_Weights = Float[Array, " W"]
# Number of steps, weights, the solver's state, and whether it is still steep.
_Carry = tuple[Int[Array, ""], _Weights, Any, Bool[Array, ""]]


class Rule(NamedTuple):
  """The form of a curve, whose numbers are fitted.

  Attributes:
    features: names of the features that kc is linear in; see `NAMES`.
    shaped: whether the curve bends the mean quality of all contexts at a
      retention, otherwise the retention itself.
    too_high: weight of the squared error where the curve is too high; 1 is the
      least-squares fit.
    ridge: weight of the squared intercept and of the squared slopes of
      standardized features, which keeps few contexts from determining large
      ones.
  """

  features: tuple[str, ...]
  shaped: bool
  too_high: float
  ridge: float = 0.0


# The paper requires an asymmetry and does not specify it. Overestimated quality
# costs answers; underestimated quality only memory.
PAPER = Rule(("nll",), shaped=False, too_high=4.0)


class Fit(NamedTuple):
  """The curve f(g(r), kc), kc = alpha NLL(c) + beta + slopes, and its error.

  Attributes:
    alpha: slope of NLL(c), per nat.
    beta: intercept.
    error: root mean square of f - y.
    slopes: pairs of a further feature and its slope.
    shape: g at measured retentions, see `kvjax.calibration.shape`; empty if
      g(r) is r.
  """

  alpha: float
  beta: float
  error: float
  slopes: tuple[tuple[str, float], ...] = ()
  shape: Shape = ()

  def predict(self, triples: Triples) -> Float[np.ndarray, " M"]:
    """Computes f at the retentions and features of triples, in float64."""
    features = triples.features
    kc = self.alpha * features.column("nll") + self.beta
    for name, slope in self.slopes:
      kc = kc + slope * features.column(name)
    with jax.enable_x64(True):
      retention = jnp.asarray(shaped(triples.retention, self.shape))
      return np.asarray(quality(retention, jnp.asarray(kc, jnp.float64)))


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
  """Fits the curve of minimum loss by L-BFGS from four starts.

  The starts have alpha and beta (0, 0), (0, -3) and (1, -5), or come from the
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
  weight = np.ones(len(triples.ratio)) if weight is None else weight
  shape = mean_quality(triples, weight) if rule.shaped else ()
  features = triples.features
  # The columns of other features are zero, so that all rules share a program.
  columns = [
    features.column(name)
    if name in rule.features
    else np.zeros_like(triples.nll, np.float64)
    for name in NAMES
  ]
  design = np.stack(columns, axis=1)
  center = np.average(design, axis=0, weights=weight)
  spread = np.sqrt(np.average((design - center) ** 2, axis=0, weights=weight))
  # Equal contexts do not determine a slope.
  spread = np.where(spread > 1e-9 * np.maximum(np.abs(center), 1), spread, 0.0)
  # Dividing by infinity makes a column of zeros, and later a slope of 0.
  scale = np.where(spread > 0, spread, np.inf)
  starts = [_standardized(*pair, center, spread) for pair in _STARTS]
  cpu = jax.local_devices(backend="cpu")[0]
  with (
    jax.enable_x64(True),
    jax.default_device(cpu),
    jax.numpy_dtype_promotion("standard"),  # optax counts in two kinds of int
  ):
    data = (
      (design - center) / scale,
      shaped(triples.retention, shape),
      triples.ratio,
      weight,
      np.array(starts),
      rule.too_high,
      rule.ridge,
    )
    weights, error = jax.device_get(
      _fit(*(jnp.asarray(x, jnp.float64) for x in data))
    )
  slopes = weights[1:] / scale
  named = dict(zip(NAMES, slopes.tolist(), strict=True))
  return Fit(
    named["nll"],
    # Back from standardized features.
    float(weights[0] - slopes @ center),
    float(error),
    tuple((name, named[name]) for name in rule.features if name != "nll"),
    shape,
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
  return np.array([beta + alpha * center[place], *slopes])


@jax.jit
def _fit(
  design: Float[Array, "M F"],
  retention: Float[Array, " M"],
  ratio: Float[Array, " M"],
  weight: Float[Array, " M"],
  starts: Float[Array, "S W"],
  too_high: Float[Array, ""],
  ridge: Float[Array, ""],
) -> tuple[_Weights, Float[Array, ""]]:
  def predict(weights: _Weights) -> Float[Array, " M"]:
    return quality(retention, weights[0] + design @ weights[1:])

  def loss(weights: _Weights) -> Float[Array, ""]:
    fitted = asymmetric_loss(predict(weights), ratio, too_high, weight)
    return fitted + ridge * jnp.sum(weights**2)

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
  openblas.load()
  # The solution of minimum norm has no slope where a column is zero.
  return jnp.linalg.lstsq(columns * root[:, None], kc * root)[0]


def _minimize(
  loss: Callable[[_Weights], Float[Array, ""]], start: _Weights
) -> _Weights:
  import optax

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
