"""The features of a prompt that its prefill yields."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Number of last tokens of the tail NLL.
TAIL = 64
# Features of the scores of a method, as `score_shape` returns them.
OF_SCORES = ("concentration", "skewness", "kurtosis")
# Features that a rule may depend on.
NAMES = ("nll", "tail_nll", *OF_SCORES, "log_length")


class Features(NamedTuple):
  """What a prefill tells about each prompt of a batch.

  Attributes:
    nll: NLL(c), the mean of -ln p over the tokens but the first, in nats; NaN
      for a single token.
    length: number of tokens.
    tail_nll: the same mean over the last `TAIL` tokens, or over fewer if the
      prompt is shorter; None if not measured.
    concentration: how few tokens have most of the weight, where a token's
      weight is the method's score minus the lowest: ln(n sum w^2 / (sum w)^2)
      for n tokens of weights w, mean over layers and heads. It is 0 if all
      weigh the same. NaN if the method does not score tokens, None if not
      measured.
    skewness: third standardized moment of the same scores, the mean of z^3 with
      z = (score - mean) / deviation; NaN or None as for `concentration`.
    kurtosis: fourth standardized moment, the mean of z^4; likewise.
    recited: what caches of the grid's retentions recite of the prompt, from
      `kvjax.recited`; None if not measured. No pass over the prompt alone tells
      it.
  """

  nll: Float[np.ndarray, " B"]
  length: Int[np.ndarray, " B"]
  tail_nll: Float[np.ndarray, " B"] | None = None
  concentration: Float[np.ndarray, " B"] | None = None
  skewness: Float[np.ndarray, " B"] | None = None
  kurtosis: Float[np.ndarray, " B"] | None = None
  recited: Float[np.ndarray, "B R"] | None = None

  def column(self, name: str) -> Float[np.ndarray, " B"]:
    """Returns one of `NAMES` in float64; NaN where it was not measured."""
    if name == "log_length":
      return np.log(np.asarray(self.length, np.float64))
    values = getattr(self, name)
    if values is None:
      return np.full(len(self.nll), np.nan)
    return np.asarray(values, np.float64)


# Those of one number for each prompt, which may have a range.
SINGLE = tuple(name for name in Features._fields if name != "recited")


def score_shape(
  scores: Float[Array, "B K T"], scored: Bool[Array, "B K T"]
) -> Float[Array, "3 B"]:
  """Computes how the scores of a layer are distributed, mean over heads.

  None of the three depends on the scale or the offset of the scores, so that
  methods compare. They are 0 where all scores are equal.

  - Concentration: with w = s - min s over the n scored tokens of a head,
    ln(n sum w^2 / (sum w)^2), from 0 if all tokens but the least weigh the same
    to ln n if a single token has all the weight. The argument of the logarithm
    is n over the participation ratio of the weights.
  - Skewness and kurtosis: the means of z^3 and z^4 with z = (s - mean) /
    deviation. A few tokens of much higher scores than the others, such as
    those of needles, raise both.

  Args:
    scores: one per slot, in float32.
    scored: slots that count; scores that are not finite do not.
  """
  scored = scored & jnp.isfinite(scores)
  least = jnp.min(scores, axis=-1, where=scored, initial=jnp.inf)
  weights = jnp.where(scored, scores - least[..., None], 0.0)
  # Relative to the greatest, so that squares neither overflow nor vanish.
  greatest = jnp.max(weights, axis=-1, keepdims=True)
  weights = weights / jnp.where(greatest > 0, greatest, 1.0)
  count = jnp.sum(scored.astype(jnp.float32), axis=-1)
  total = jnp.sum(weights, axis=-1)
  squares = jnp.sum(weights**2, axis=-1)
  uneven = total > 0
  ratio = count * squares / jnp.where(uneven, total, 1.0) ** 2
  concentration = jnp.log(jnp.where(uneven, ratio, 1.0))

  def mean(values: Float[Array, "B K T"]) -> Float[Array, "B K 1"]:
    sums = jnp.sum(jnp.where(scored, values, 0.0), axis=-1, keepdims=True)
    return sums / jnp.maximum(count, 1.0)[..., None]

  distance = weights - mean(weights)
  variance = mean(distance**2)
  # Rounding leaves a variance where there is none.
  varies = uneven[..., None] & (variance > 1e-12)
  z = jnp.where(varies, distance, 0.0) / jnp.sqrt(
    jnp.where(varies, variance, 1.0)
  )
  moments = [mean(z**power)[..., 0] for power in (3, 4)]
  return jnp.mean(jnp.stack([concentration, *moments]), axis=2)
