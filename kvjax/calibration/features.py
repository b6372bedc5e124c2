"""The features of a prompt that its prefill yields."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Number of last tokens of the tail NLL.
TAIL = 64
# Features that a rule may depend on.
NAMES = ("nll", "tail_nll", "concentration", "log_length")


class Features(NamedTuple):
  """What a prefill tells about each prompt of a batch.

  Attributes:
    nll: NLL(c), the mean of -ln p over the tokens but the first, in nats; NaN
      for a single token.
    length: number of tokens.
    tail_nll: the same mean over the last `TAIL` tokens, or over fewer if the
      prompt is shorter; None if not measured.
    concentration: of the method's scores, see `concentration`; NaN if the
      method does not score tokens, None if not measured.
  """

  nll: Float[np.ndarray, " B"]
  length: Int[np.ndarray, " B"]
  tail_nll: Float[np.ndarray, " B"] | None = None
  concentration: Float[np.ndarray, " B"] | None = None

  def column(self, name: str) -> Float[np.ndarray, " B"]:
    """Returns one of `NAMES` in float64; NaN where it was not measured."""
    if name == "log_length":
      return np.log(np.asarray(self.length, np.float64))
    values = getattr(self, name)
    if values is None:
      return np.full(len(self.nll), np.nan)
    return np.asarray(values, np.float64)


def concentration(
  scores: Float[Array, "B K T"], scored: Bool[Array, "B K T"]
) -> Float[Array, " B"]:
  """Computes how few tokens the scores of a layer prefer, mean over heads.

  With w = s - min s over the n scored tokens of a head, it is
  ln(n sum w^2 / (sum w)^2): 0 if all tokens but the least weigh the same, up to
  ln n if a single token has all the weight. The argument of the logarithm is n
  over the participation ratio of the weights. It does not depend on the scale
  or the offset of the scores, so that methods compare.

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
  return jnp.mean(jnp.log(jnp.where(uneven, ratio, 1.0)), axis=1)
