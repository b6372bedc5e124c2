"""KeyL2Norm: keep keys of small norm, which attract attention."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.heads import Head
from kvjax.methods.headwise import HeadwiseMethod
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_layers


@dataclasses.dataclass(frozen=True)
class KeyL2Norm(HeadwiseMethod):
  """Keeps the keys with the smallest L2 norm, which RoPE does not change.

  Source: Devoto et al., arXiv 2406.11430.

  Attributes:
    skip_layers: layers that keep everything; LagKV's comparison skips 0 and 1,
      KeyDiff's none.
  """

  skip_layers: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    super().__post_init__()
    check_layers(self, "skip_layers")

  @property
  def traits(self) -> Traits:
    """Skipped layers keep everything and have no share of the budget."""
    even = "it leaves layers whole" if self.skip_layers else ""
    return Traits(keeps_layers=self.skip_layers, even=even, queries=0)

  def score_head(self, head: Head) -> Float[Array, " T"]:
    """Scores keys by their negative norm."""
    # Scores of empty slots are ignored: a mask would copy all keys.
    keys = head.cached_keys.astype(jnp.float32)
    return -jnp.linalg.norm(keys, axis=-1)
