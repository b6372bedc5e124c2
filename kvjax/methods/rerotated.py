"""Rerotation: kept tokens move to their places in the cache."""

import dataclasses

from kvjax.errors import InputError
from kvjax.labels import name_of
from kvjax.methods.around import Around
from kvjax.methods.traits import Traits


@dataclasses.dataclass(frozen=True)
class Rerotated(Around):
  """Renumbers and rerotates the tokens that another method keeps.

  The kept tokens get the positions 0, 1, 2, ... in every head, and the next
  token follows the last of them, so that no position is beyond what the cache
  holds. In blocks and while decoding, every step rerotates all keys; the method
  selects among keys at their positions in the text.

  Source: Xiao et al., arXiv 2309.17453, Section 3.2; for any method, kvpress's
  KeyRerotationPress.

  Attributes:
    over: the method that selects.
  """

  def __post_init__(self) -> None:
    super().__post_init__()
    name, traits = name_of(self.over), self.over.traits
    reason = traits.coarse
    if self.over.allocation.ragged:
      reason = "its heads share a budget"
    if traits.keeps_layers:
      reason = "it leaves layers whole"
    if reason:
      raise InputError(
        "Rerotated tokens are followed by the same position in all heads, "
        f"which must therefore keep as many tokens; those of {name} may not: "
        f"{reason}."
      )

  @property
  def traits(self) -> Traits:
    """Those of the method; all heads must keep the same number of tokens."""
    even = "rerotated, all heads must keep the same number of tokens"
    return dataclasses.replace(self.over.traits, renumbers=True, even=even)
