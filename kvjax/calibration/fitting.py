"""Calibrations from measurements: how quality fell with retention."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from kvjax.calibration.record import Calibration, quality
from kvjax.errors import InputError

# A guess at more than is left costs answers, one at less only memory.
_TOO_HIGH = 4.0
_FLOOR = 1e-3
_MOST = 1.5
# Where bisection looks for kc: beyond it the curves are steps.
_BEND = 60.0
_HALVINGS = 50
_STEPS = 300
_FLAT = 1e-9
# alpha and beta to begin with, beside those of a straight line.
_STARTS = ((0.0, -3.0), (1.0, -5.0))

_Line = Float[Array, "2"]
# Steps taken, the line, the solver's state, and whether it is still steep.
_Carry = tuple[Int[Array, ""], _Line, Any, Bool[Array, ""]]


class Triples(NamedTuple):
  """What was measured, one element for each context and retention.

  Attributes:
    retention: r, above 0 and below 1; at 1 there is nothing to learn.
    nll: NLL(c) of the whole context, in nats.
    ratio: y, the quality left; see `nll_ratio`.
  """

  retention: Float[np.ndarray, " M"]
  nll: Float[np.ndarray, " M"]
  ratio: Float[np.ndarray, " M"]


class Fit(NamedTuple):
  """The line kc = alpha NLL(c) + beta, and its error.

  Attributes:
    alpha: per nat.
    beta: the rest.
    error: root mean square of f - y.
  """

  alpha: float
  beta: float
  error: float


def nll_ratio(
  full: Float[np.ndarray, "*M"], kept: Float[np.ndarray, "*M"]
) -> Float[np.ndarray, "*M"]:
  """y: how likely an answer still is; 1 for as likely as with everything.

  Args:
    full: NLL per token of an answer, in nats, given the whole context.
    kept: the same, given what was kept of it.
  """
  full, kept = np.asarray(full, np.float64), np.asarray(kept, np.float64)
  return np.clip((full + _FLOOR) / (kept + _FLOOR), 0.0, _MOST)


def asymmetric_loss(
  line: _Line,
  retention: Float[Array, " M"],
  nll: Float[Array, " M"],
  ratio: Float[Array, " M"],
) -> Float[Array, ""]:
  """Mean square of e = f - y, four times as heavy where f promises too much.

  The paper asks for an asymmetry and does not say how much.
  """
  error = quality(retention, line[0] * nll + line[1]) - ratio
  weight = jnp.where(error > 0, _TOO_HIGH, 1.0)
  return jnp.mean(weight * error**2)


def fit(triples: Triples) -> Fit:
  """The line of the least loss that L-BFGS finds from three starts.

  They are (0, -3), (1, -5), and the straight line through what each triple by
  itself says of kc. A few thousand numbers are a moment's work for any
  processor, so they are fitted in float64 on the CPU: accelerators have none,
  and in float32 the line search stops where the loss is flat.

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
    model_id: tells the weights from others: a name, a digest.
    method: a method, or the label of a plan (`kvjax.Plan.label`).
    per_query_head: whether each query head chose for itself.

  Raises:
    InputError: see `fit`.
  """
  found = fit(triples)
  return Calibration(
    alpha=found.alpha,
    beta=found.beta,
    model_id=model_id,
    method=str(method),
    per_query_head=per_query_head,
    tau_range=(
      min(float(triples.ratio.min()), 1.0),
      min(float(triples.ratio.max()), 1.0),
    ),
    error=found.error,
    triples=len(triples.ratio),
  )


def promises(
  asked: Sequence[float],
  ratios: Float[np.ndarray, "Q M"],
  cut: Bool[np.ndarray, "Q M"],
) -> tuple[tuple[float, float], ...]:
  """What contexts keep on average where a curve is asked for a quality.

  A curve may promise too much: it is one of a family, and near r = 1, where one
  token can be the needle, it is extrapolated. So contexts that it was not
  fitted to are compressed to what it asks for. With their qualities q, at most
  1, the promise is sum(q) / (n + 1), as if there were one more that lost
  everything. Whoever takes, for any tau, the least quality asked for with a
  promise of tau or more, or else keeps everything, leaves contexts drawn like
  those tau on average, however wrong the curve is.

  Source: Theorem 1 of conformal risk control, Angelopoulos et al., arXiv
  2208.02814, with losses 1 - q of at most 1. It wants losses that never rise as
  more is asked for: a context has no more than the least that it keeps wherever
  more is asked for. A context of which no token had to go for being too short
  tells nothing of a longer one: it has what it kept where less was asked for.

  Args:
    asked: qualities below 1, ascending.
    ratios: y of each context at each of them; see `nll_ratio`.
    cut: where a token at least had to go.
  """
  kept = np.zeros(ratios.shape[1])
  found = []
  for ratio, some in zip(ratios, cut, strict=True):
    kept = np.where(some, np.minimum(ratio, 1.0), kept)
    found.append(kept)
  least = np.minimum.accumulate(found[::-1])[::-1]
  means = least.sum(axis=1) / (least.shape[1] + 1)
  return tuple(zip(asked, means.tolist(), strict=True))


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

  def minimized(start: _Line) -> tuple[_Line, Float[Array, ""]]:
    line = _minimized(loss, start)
    return line, loss(line)

  given = jnp.asarray(_STARTS, nll.dtype)
  starts = jnp.concatenate([_straight(retention, nll, ratio)[None], given])
  lines, losses = jax.lax.map(minimized, starts)
  best = jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))
  line = lines[best]
  error = quality(retention, line[0] * nll + line[1]) - ratio
  return line, jnp.sqrt(jnp.mean(error**2))


def _straight(
  retention: Float[Array, " M"],
  nll: Float[Array, " M"],
  ratio: Float[Array, " M"],
) -> _Line:
  """The regression on NLL(c) of the kc of each triple, found by bisection."""

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
  away = nll - jnp.mean(nll)
  spread = jnp.sum(away**2)
  # Contexts that are all alike say nothing of the slope.
  slope = jnp.sum(away * kc) / jnp.where(spread > 0, spread, 1.0)
  return jnp.stack([slope, jnp.mean(kc) - slope * jnp.mean(nll)])


def _minimized(
  loss: Callable[[_Line], Float[Array, ""]], start: _Line
) -> _Line:
  solver = optax.lbfgs()
  evaluate = optax.value_and_grad_from_state(loss)

  def step(carry: _Carry) -> _Carry:
    count, line, state, _ = carry
    value, slope = evaluate(line, state=state)
    change, state = solver.update(
      slope, state, line, value=value, grad=slope, value_fn=loss
    )
    return count + 1, line + change, state, jnp.linalg.norm(slope) > _FLAT

  def go_on(carry: _Carry) -> Bool[Array, ""]:
    count, _, _, steep = carry
    return steep & (count < _STEPS)

  zero = jnp.zeros((), jnp.int32)
  first = (zero, start, solver.init(start), jnp.asarray(True))
  return jax.lax.while_loop(go_on, step, first)[1]
