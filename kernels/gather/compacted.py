"""What is left of a cache."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int, Shaped


class Compacted(NamedTuple):
  """The kept slots of a cache, in the order in which they were listed.

  Attributes:
    keys: keys; zeros where no slot was named.
    values: values, likewise.
    positions: places of the tokens; -1 for a slot that is empty.
    received: what was known of each token, if anything; 0 for no slot.
  """

  keys: Shaped[Array, "B K M D"]
  values: Shaped[Array, "B K M Dv"]
  positions: Int[Array, "B K M"]
  received: Float[Array, "B K M"] | None
