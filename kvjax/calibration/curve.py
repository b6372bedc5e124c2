"""The curve of quality against retention, and its inverse."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.errors import InputError
from kvjax.options.bounds import check_number

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
  # A gradient passes through both branches of `where`: the other one gets a
  # harmless kc, or its infinite slope would make the gradient NaN.
  negative = jnp.where(near_zero | (kc > 0), -1.0, kc)
  positive = jnp.where(near_zero | (kc < 0), 1.0, kc)
  bent_up = jnp.expm1(retention * negative) / jnp.expm1(negative)
  # The same quotient with exp(kc) divided out: expm1(kc) would overflow.
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


def check_tau(tau: float) -> None:
  """Refuses a tau that is not a share of quality.

  Raises:
    InputError: it is not above 0 and at most 1.
  """
  check_number("tau", tau)
  if not 0 < tau <= 1:
    raise InputError(
      "tau is the share of quality that is to be left, above 0 and at most 1; "
      f"{tau:g} is not."
    )
