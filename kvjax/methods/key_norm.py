"""KeyL2Norm: keys of small norm attract attention."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.heads import Head, HeadwiseMethod


@dataclasses.dataclass(frozen=True)
class KeyL2Norm(HeadwiseMethod):
  """Keeps the keys of lowest L2 norm, which RoPE does not change.

  Source: Devoto et al., arXiv 2406.11430.

  Attributes:
    skip_layers: layers that keep everything; LagKV's comparison skips 0 and 1,
      KeyDiff's none.
  """

  skip_layers: tuple[int, ...] = ()

  def keeps_all(self, layer: int) -> bool:
    """True for the skipped layers."""
    return layer in self.skip_layers

  @property
  def why_even(self) -> str:
    """Skipped layers take no share."""
    return "it leaves layers whole" if self.skip_layers else ""

  def score_head(self, head: Head) -> Float[Array, " T"]:
    """The negative norm."""
    return -jnp.linalg.norm(head.keys, axis=-1)
