"""Measurements of quality and retention."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from kvjax.calibration.features import NAMES, Features

_FLOOR = 1e-3
_MOST = 1.5


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
    skewness: see `Features`; None if not measured.
    kurtosis: likewise.
    recited: what the cache recites of the context; see `kvjax.recited`. None if
      not measured.
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
  skewness: Float[np.ndarray, " M"] | None = None
  kurtosis: Float[np.ndarray, " M"] | None = None
  recited: Float[np.ndarray, " M"] | None = None

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
  def capped(self) -> "Triples":
    """The same with qualities of at most 1."""
    return self._replace(ratio=np.minimum(self.ratio, 1.0))

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
    return Features(
      self.nll,
      length,
      self.tail_nll,
      self.concentration,
      self.skewness,
      self.kurtosis,
    )

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
  the answer's tokens, at most 1: an answer that becomes more likely does not
  make up for one that is lost. Unlike `nll_ratio`, it needs no floor, and an
  answer that a model is sure of stays near 1 while the model is sure of it.

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
  return np.exp(np.minimum(full - kept, 0.0))
