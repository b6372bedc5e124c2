"""StreamingLLM: attention sinks and the most recent tokens."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets import Budget
from kvjax.cache import LayerCache
from kvjax.errors import InputError
from kvjax.methods.base import Head, HeadwiseMethod


@dataclasses.dataclass(frozen=True)
class StreamingLLM(HeadwiseMethod):
  """Keeps the first `sinks` tokens and fills the budget with the newest.

  Source: Xiao et al., arXiv 2309.17453.

  Attributes:
    sinks: first tokens of the row that always stay.
    rerotate: number and rotate what is kept by its place in the cache, after a
      whole prompt; else it keeps the positions of the text.
  """

  sinks: int = 4
  rerotate: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.sinks < 0:
      raise InputError(f"sinks must be 0 or more; {self.sinks} is not.")

  def check_schedule(self, budget: Budget) -> None:
    """Turning rounded keys again and again would wear them out.

    Raises:
      InputError: with `rerotate`.
    """
    del budget
    if self.rerotate:
      raise InputError(
        "StreamingLLM turns keys once, after a whole prompt; to evict block by "
        "block or while decoding, leave rerotate off."
      )

  @property
  def rerotates(self) -> bool:
    """As asked for."""
    return self.rerotate

  def check_protected(
    self, protected: Bool[np.ndarray, " n"], budget: Budget, layers: int
  ) -> None:
    """As all methods, but what is renumbered cannot be protected by position.

    Raises:
      InputError: too many, or any with `rerotate`.
    """
    super().check_protected(protected, budget, layers)
    if self.rerotate and protected.any():
      raise InputError(
        "With rerotate tokens lose the positions by which they are protected; "
        "protect tokens without it, or keep more sinks."
      )

  def score_head(self, head: Head) -> Float[Array, " T"]:
    """Recency."""
    return head.positions.astype(jnp.float32)

  def protected(
    self, cache: LayerCache, counts: Int[Array, " B"]
  ) -> Bool[Array, "B K T"]:
    """The sinks."""
    del counts
    return (cache.positions >= 0) & (cache.positions < self.sinks)
