"""Counts the tokens of a cache."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

import kvjax
from kvjax import hosts
from kvjax.cache.window import WindowLayer


class TokenCounts(NamedTuple):
  """Token counts of each row of a cache.

  Attributes:
    kept: tokens in the cache, mean over layers and KV heads.
    read: tokens that the next token attends to, likewise.
    kept_globally: tokens in layers without a window, which budgets are of,
      likewise; None unless some layers have a window and others have none.
  """

  kept: Float[np.ndarray, " R"]
  read: Float[np.ndarray, " R"]
  kept_globally: Float[np.ndarray, " R"] | None

  @classmethod
  def of(cls, cache: kvjax.Cache) -> "TokenCounts":
    """Counts the tokens of a cache."""
    kept, read = hosts.read((cache.lengths, cache.num_attended))
    is_local = [
      isinstance(cache.stacks[stack], WindowLayer)
      for stack in cache.order
      if stack >= 0
    ]

    def mean(counts: Int[np.ndarray, "L R K"]) -> Float[np.ndarray, " R"]:
      return np.mean(counts, axis=(0, 2), dtype=np.float64)

    of_global = None
    if any(is_local) and not all(is_local):
      of_global = mean(kept[np.logical_not(is_local)])
    return cls(mean(kept), mean(read), of_global)

  @property
  def evictable(self) -> Float[np.ndarray, " R"]:
    """Tokens in the layers that budgets are of, mean over these and KV heads.

    If all layers have a window, those in all.
    """
    return self.kept if self.kept_globally is None else self.kept_globally
