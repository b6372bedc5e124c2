"""Methods that score one head."""

import abc
import dataclasses
from typing import final

import jax
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.heads import heads_of
from kvjax.cache.layers import LayerCache
from kvjax.heads import Head
from kvjax.methods.base import ScoringMethod


@dataclasses.dataclass(frozen=True)
class HeadwiseMethod(ScoringMethod):
  """A method whose score is a function of one KV head.

  Implement `score_head`; each head keeps the slots with the highest scores.
  `protected` and `traits` may be overridden, as those of any `ScoringMethod`.
  """

  @abc.abstractmethod
  def score_head(self, head: Head) -> Float[Array, " T"]:
    """Computes a float32 score for every slot; those of empty ones are ignored.

    Args:
      head: keys, values and queries of one KV head of one row.
    """

  @final
  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Vmaps `score_head` over rows and KV heads."""
    del layer
    return jax.vmap(jax.vmap(self.score_head))(heads_of(cache, activations))
