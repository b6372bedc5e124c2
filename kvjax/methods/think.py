"""ThinK: channels of the kept keys that hardly matter are dropped."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.methods.around import Around
from kvjax.methods.base import Method
from kvjax.methods.channels import Channels
from kvjax.methods.heads import by_kv_head, window_queries
from kvjax.methods.traits import Traits


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
  def _channels(self) -> Channels:
    return Channels(self.share, self.window)

  @property
  def traits(self) -> Traits:
    """Those of the method, for whole prompts."""
    inner = self.over.traits
    return dataclasses.replace(
      inner.once("channels are dropped once, after the whole prompt"),
      protects=inner.protects,
      channels=self._channels,
    )


def keep_channels(
  channels: Channels, cache: LayerCache, activations: Activations
) -> Int[Array, "B K C"]:
  """Chooses the channels to keep, ascending.

  Args:
    channels: how many.
    cache: the kept tokens.
    activations: activations of the prompt.
  """
  queries, positions = window_queries(cache, activations, channels.window)
  squares = by_kv_head(queries.astype(jnp.float32) ** 2, cache.keys.shape[1])
  asked = (positions >= 0)[:, None, None, :, None]
  # Numbers of queries and keys are the same for all channels of a head.
  by_queries = jnp.sum(jnp.where(asked, squares, 0.0), axis=(2, 3))
  keys = cache.float_keys
  scores = by_queries * jnp.sum(keys**2, axis=2)
  _, kept = jax.lax.top_k(scores, channels.kept(keys.shape[-1]))
  return jnp.sort(kept, axis=-1)
