"""ThinK: channels of the kept keys that hardly matter are dropped."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.heads import by_kv_head
from kvjax.methods.around import Around
from kvjax.methods.base import Method
from kvjax.methods.channels import Channels
from kvjax.methods.last_queries import window_queries
from kvjax.methods.traits import Traits, most_queries
from kvjax.options.bounds import check_least, check_share


@dataclasses.dataclass(frozen=True)
class BestChannels(Channels):
  """The channels with the highest products of mean squares; see `Think`.

  Attributes:
    share: share of the channels that is dropped.
    window: W, number of last queries.
  """

  share: float
  window: int

  def __post_init__(self) -> None:
    check_share(self, "share")
    check_least(self, window=1)

  def choose(
    self, cache: LayerCache, activations: Activations
  ) -> Int[Array, "B K C"]:
    """Chooses the channels to store, at least one."""
    queries, positions = window_queries(cache, activations, self.window)
    squares = by_kv_head(queries.astype(jnp.float32) ** 2, cache.keys.shape[1])
    asked = (positions >= 0)[:, None, None, :, None]
    # Numbers of queries and keys are the same for all channels of a head.
    by_queries = jnp.sum(jnp.where(asked, squares, 0.0), axis=(2, 3))
    keys = cache.float_keys
    scores = by_queries * jnp.sum(keys**2, axis=2)
    dim = keys.shape[-1]
    # The share is a decimal: in floating point, 0.29 * 100 is less than 29.
    dropped = math.floor(dim * self.share + 1e-9)
    _, kept = jax.lax.top_k(scores, max(1, dim - dropped))
    return jnp.sort(kept, axis=-1)


@dataclasses.dataclass(frozen=True)
class Think(Around):
  """Drops channels of the keys that another method keeps.

  In every KV head, the score of a channel is the mean square of the last
  queries there, over the group's query heads, times the mean square of the kept
  keys. The channels with the lowest scores are dropped from all kept keys, and
  their memory is freed. Values stay whole, and so do the keys of later tokens.
  The scale of the logits is that of whole keys.

  Source: Xu et al., arXiv 2407.21018, as kvpress's ThinKPress scores. That
  writes zeros; the paper's code keeps the keys of the window whole.

  Attributes:
    over: the method that selects tokens.
    share: share of the channels that is dropped.
    window: W, number of last queries.
  """

  over: Method
  share: float = 0.5
  window: int = 32

  def __post_init__(self) -> None:
    super().__post_init__()
    _ = self._channels

  @property
  def _channels(self) -> BestChannels:
    return BestChannels(self.share, self.window)

  @property
  def traits(self) -> Traits:
    """Those of the method, for whole prompts."""
    inner = self.over.traits
    return dataclasses.replace(
      inner.once("channels are dropped once, after the whole prompt"),
      protects=inner.protects,
      queries=most_queries((inner.queries, self.window)),
      channels=self._channels,
    )
