"""Fitting of calibrations to measurements of quality and retention."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from kvjax.calibration.record import Calibration, quality
from kvjax.errors import InputError

# Overestimated quality costs answers; underestimated quality only memory.
_TOO_HIGH = 4.0
_FLOOR = 1e-3
_MOST = 1.5
# Range of the bisection for kc: beyond it the curves are step functions.
_BEND = 60.0
_HALVINGS = 50
_STEPS = 300
_FLAT = 1e-9
# Initial alpha and beta, in addition to those of the regression.
_STARTS = ((0.0, -3.0), (1.0, -5.0))

_Line = Float[Array, "2"]
# Number of steps, the line, the solver's state, and whether it is still steep.
_Carry = tuple[Int[Array, ""], _Line, Any, Bool[Array, ""]]


class Triples(NamedTuple):
  """Measurements, one element per context and retention.

  Attributes:
    retention: r, above 0 and below 1.
    nll: NLL(c) of the whole context, in nats.
    ratio: y, the remaining quality; see `nll_ratio`.
  """

  retention: Float[np.ndarray, " M"]
  nll: Float[np.ndarray, " M"]
  ratio: Float[np.ndarray, " M"]


class Fit(NamedTuple):
  """The line kc = alpha NLL(c) + beta, and its error.

  Attributes:
    alpha: slope, per nat.
    beta: intercept.
    error: root mean square of f - y.
  """

  alpha: float
  beta: float
  error: float


def nll_ratio(
  full: Float[np.ndarray, "*M"], kept: Float[np.ndarray, "*M"]
) -> Float[np.ndarray, "*M"]:
  """Computes y, the ratio of an answer's NLL with full and compressed context.

  It is 1 if compression does not change the likelihood, and smaller if the
  answer becomes less likely.

  Args:
    full: NLL per token of an answer, in nats, given the full context.
    kept: NLL per token of the same answer, given the compressed context.

  Example:
    >>> import numpy as np
    >>> import kvjax
    >>> full, kept = np.array([1.0, 1.0]), np.array([1.0, 2.0])
    >>> kvjax.nll_ratio(full, kept).round(2).tolist()
    [1.0, 0.5]
  """
  full, kept = np.asarray(full, np.float64), np.asarray(kept, np.float64)
  return np.clip((full + _FLOOR) / (kept + _FLOOR), 0.0, _MOST)


def asymmetric_loss(
  line: _Line,
  retention: Float[Array, " M"],
  nll: Float[Array, " M"],
  ratio: Float[Array, " M"],
) -> Float[Array, ""]:
  """Mean square of e = f - y, with four times the weight where f is too high.

  The paper requires an asymmetry and does not specify it.
  """
  error = quality(retention, line[0] * nll + line[1]) - ratio
  weight = jnp.where(error > 0, _TOO_HIGH, 1.0)
  return jnp.mean(weight * error**2)


def fit(triples: Triples) -> Fit:
  """Fits the line of minimum loss by L-BFGS from three starts.

  The starts are (0, -3), (1, -5), and the regression on the kc of each single
  triple. The fit runs in float64 on the CPU, because most accelerators lack
  float64 and the line search stops early in float32 where the loss is flat.

  Raises:
    InputError: there is no triple, one has a retention that is not between 0
      and 1, or is not finite.
  """
  _check(triples)
  cpu = jax.devices("cpu")[0]
  with (
    jax.enable_x64(True),
    jax.default_device(cpu),
    jax.numpy_dtype_promotion("standard"),  # optax counts in two kinds of int
  ):
    data = [jnp.asarray(x, jnp.float64) for x in triples]
    line, error = jax.device_get(_fit(*data))
  return Fit(float(line[0]), float(line[1]), float(error))


def calibrate(
  triples: Triples,
  *,
  model_id: str,
  method: object,
  per_query_head: bool = False,
) -> Calibration:
  """Fits a calibration.

  Args:
    triples: measured with the model and the method.
    model_id: identifies the weights: a name or a digest.
    method: a method, or the label of a plan (`kvjax.Plan.label`).
    per_query_head: whether each query head selected its own tokens.

  Raises:
    InputError: see `fit`.

  Example:
    >>> import numpy as np
    >>> import kvjax
    >>> triples = kvjax.Triples(
    ...   retention=np.array([0.2, 0.5, 0.2, 0.5]),
    ...   nll=np.array([1.0, 1.0, 2.0, 2.0]),
    ...   ratio=np.array([0.5, 0.9, 0.3, 0.7]),
    ... )
    >>> method = kvjax.get_method("keydiff")
    >>> calibration = kvjax.calibrate(triples, model_id="tiny", method=method)
    >>> calibration.triples
    4
  """
  fitted = fit(triples)
  return Calibration(
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
  )


def promises(
  targets: Sequence[float],
  ratios: Float[np.ndarray, "Q M"],
  evicts: Bool[np.ndarray, "Q M"],
) -> tuple[tuple[float, float], ...]:
  """Lower bounds of the mean quality of contexts for each target of a curve.

  A curve may overestimate quality: it is one of a family, and near r = 1, where
  a single token can matter, it is extrapolated. Therefore held-out contexts are
  compressed to what the curve predicts for a target. With their qualities q, at
  most 1, the promise is sum(q) / (n + 1), as if one more context had lost
  everything. For any tau, use the smallest target with a promise of at least
  tau, or keep everything if there is none. The mean quality of contexts from
  the same distribution is then at least tau, however wrong the curve is.

  Source: Theorem 1 of conformal risk control, Angelopoulos et al., arXiv
  2208.02814, with losses 1 - q of at most 1. It requires losses that never rise
  with the target. Therefore a context's quality is replaced by its minimum over
  all higher targets. A context that is too short to evict any token has the
  quality of the previous target.

  Args:
    targets: qualities below 1, ascending.
    ratios: y of each context at each target; see `nll_ratio`.
    evicts: whether at least one token was evicted.

  Returns:
    Pairs of a target and its promise.
  """
  kept = np.zeros(ratios.shape[1])
  kept_by_target = []
  for ratio, any_evicted in zip(ratios, evicts, strict=True):
    kept = np.where(any_evicted, np.minimum(ratio, 1.0), kept)
    kept_by_target.append(kept)
  least = np.minimum.accumulate(kept_by_target[::-1])[::-1]
  means = least.sum(axis=1) / (least.shape[1] + 1)
  return tuple(zip(targets, means.tolist(), strict=True))


def _check(triples: Triples) -> None:
  if not len(triples.ratio):
    raise InputError("There is nothing to fit; give at least one triple.")
  if not all(np.all(np.isfinite(x)) for x in triples):
    raise InputError("Triples must be finite numbers; some are not.")
  outside = (triples.retention <= 0) | (triples.retention >= 1)
  if np.any(outside):
    raise InputError(
      "The retentions of triples are above 0 and below 1; "
      f"{triples.retention[outside][0]:g} is not."
    )


@jax.jit
def _fit(
  retention: Float[Array, " M"],
  nll: Float[Array, " M"],
  ratio: Float[Array, " M"],
) -> tuple[_Line, Float[Array, ""]]:
  def loss(line: _Line) -> Float[Array, ""]:
    return asymmetric_loss(line, retention, nll, ratio)

  def minimize(start: _Line) -> tuple[_Line, Float[Array, ""]]:
    line = _minimize(loss, start)
    return line, loss(line)

  given = jnp.asarray(_STARTS, nll.dtype)
  starts = jnp.concatenate([_regress(retention, nll, ratio)[None], given])
  lines, losses = jax.lax.map(minimize, starts)
  best = jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
  line = lines[best]
  error = quality(retention, line[0] * nll + line[1]) - ratio
  return line, jnp.sqrt(jnp.mean(error**2))


def _regress(
  retention: Float[Array, " M"],
  nll: Float[Array, " M"],
  ratio: Float[Array, " M"],
) -> _Line:
  """Regresses the kc of each triple, found by bisection, on NLL(c)."""

  def halve(
    _: Int[Array, ""], ends: Float[Array, "2 M"]
  ) -> Float[Array, "2 M"]:
    middle = jnp.mean(ends, axis=0)
    # f falls with kc.
    higher = quality(retention, middle) > ratio
    return jnp.stack(
      [jnp.where(higher, middle, ends[0]), jnp.where(higher, ends[1], middle)]
    )

  ends = jnp.stack([jnp.full_like(nll, -_BEND), jnp.full_like(nll, _BEND)])
  kc = jnp.mean(jax.lax.fori_loop(0, _HALVINGS, halve, ends), axis=0)
  centered = nll - jnp.mean(nll)
  spread = jnp.sum(centered**2)
  # Equal contexts do not determine the slope.
  slope = jnp.sum(centered * kc) / jnp.where(spread > 0, spread, 1.0)
  return jnp.stack([slope, jnp.mean(kc) - slope * jnp.mean(nll)])


def _minimize(loss: Callable[[_Line], Float[Array, ""]], start: _Line) -> _Line:
  solver = optax.lbfgs()
  evaluate = optax.value_and_grad_from_state(loss)

  def step(carry: _Carry) -> _Carry:
    count, line, state, _ = carry
    value, slope = evaluate(line, state=state)
    change, state = solver.update(
      slope, state, line, value=value, grad=slope, value_fn=loss
    )
    return count + 1, line + change, state, jnp.linalg.norm(slope) > _FLAT

  def unfinished(carry: _Carry) -> Bool[Array, ""]:
    count, _, _, steep = carry
    return steep & (count < _STEPS)

  zero = jnp.zeros((), jnp.int32)
  first = (zero, start, solver.init(start), jnp.asarray(True))
  return jax.lax.while_loop(unfinished, step, first)[1]
