"""StreamingLLM: keep attention sinks and the most recent tokens."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.layers import LayerCache
from kvjax.heads import Head
from kvjax.methods.headwise import HeadwiseMethod
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least, check_share
from kvjax.selection import floor_share


@dataclasses.dataclass(frozen=True)
class StreamingLLM(HeadwiseMethod):
  """Keeps the first `sinks` tokens and fills the budget with the newest.

  Source: Xiao et al., arXiv 2309.17453.

  Attributes:
    sinks: number of first tokens that are kept.
    rerotate: renumber and rerotate tokens by their place in the cache, as the
      paper does; if not, they keep their positions in the text. In blocks and
      while decoding, every step rerotates all keys.
    recent_frac: share of the budget that is reserved for the newest tokens.
  """

  sinks: int = 4
  rerotate: bool = False
  recent_frac: float = 0.0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, sinks=0)
    check_share(self, "recent_frac")

  @property
  def traits(self) -> Traits:
    """With `rerotate`, all heads must keep the same number of tokens."""
    if not self.rerotate:
      return Traits(positional=True, sinks=self.sinks, queries=0)
    even = "with rerotate the next token follows the last that is kept"
    return Traits(
      renumbers=True, positional=True, sinks=self.sinks, even=even, queries=0
    )

  def score_head(self, head: Head) -> Float[Array, " T"]:
    """Scores tokens by their position."""
    # Exact in float32 up to 2^24 positions.
    return head.positions.astype(jnp.float32)

  def protected(
    self, cache: LayerCache, counts: Int[Array, " B #K"]
  ) -> Bool[Array, "B K T"]:
    """The sinks."""
    most = floor_share(counts, 1 - self.recent_frac)
    sinks = jnp.minimum(self.sinks, most)
    return cache.valid & (cache.positions < sinks[:, :, None])
