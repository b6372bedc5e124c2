"""Triples of made-up contexts, whose curve is known."""

import numpy as np

from kvjax.calibration.features import Features
from kvjax.calibration.measured import Triples

RETENTIONS = [0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 0.9]


def plain(retention, kc):
  """The paper's formula in float64, where that is well conditioned."""
  return np.expm1(retention * kc) / np.expm1(kc)


def triples(alpha, beta, noise=0.0, contexts=80):
  rng = np.random.default_rng(1)
  nll = np.repeat(rng.uniform(0.3, 4, contexts), len(RETENTIONS))
  r = np.tile(RETENTIONS, contexts)
  y = plain(r, alpha * nll + beta) + noise * rng.normal(size=r.shape)
  return Triples(r, nll, np.clip(y, 0, 1.5))


FEATURES = ("nll", "tail_nll", "concentration", "log_length")


def wide_triples(power=1.0, noise=0.0, contexts=60):
  """Triples of two tasks whose curves depend on all features."""
  rng = np.random.default_rng(2)
  context = np.repeat(np.arange(contexts), len(RETENTIONS))
  features = Features(
    rng.uniform(0.3, 4, contexts)[context],
    rng.integers(100, 2000, contexts)[context],
    rng.uniform(0.3, 4, contexts)[context],
    rng.uniform(0, 2, contexts)[context],
  )
  r = np.tile(RETENTIONS, contexts)
  kc = -6 + features.column("nll") - features.column("tail_nll") / 2
  kc += 2 * features.column("concentration") + features.column("log_length") / 4
  y = plain(r**power, kc) + noise * rng.normal(size=r.shape)
  return Triples(
    r,
    features.nll,
    np.clip(y, 0, 1.5),
    features.length,
    features.tail_nll,
    features.concentration,
    context,
    [("one", "two")[c % 2] for c in context],
  )
