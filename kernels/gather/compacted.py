"""The result of compacting a cache."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int, Shaped


class Compacted(NamedTuple):
  """The kept slots of a cache, in the order of their list.

  Attributes:
    keys: keys; zeros where the list has no slot.
    values: values, likewise.
    positions: positions of the tokens; -1 for an empty slot.
    remembered: the extra number of each token, if given; 0 for no slot.
  """

  keys: Shaped[Array, "B K M D"]
  values: Shaped[Array, "B K M Dv"]
  positions: Int[Array, "B K M"]
  remembered: Float[Array, "B K M"] | None
