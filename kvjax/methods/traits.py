"""What a method needs and refuses, declared once."""

import dataclasses

from kvjax.activations import OPTIONAL
from kvjax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Traits:
  """What the engine, the checks and the tests go by.

  Raises InputError where a number is negative or an activation unknown.

  Attributes:
    whole_prompts_only: why the method cannot evict block by block or while
      decoding, as the end of a sentence; empty if it can.
    even: why layers and heads must get equal shares of a budget, likewise.
    window: W, last queries that the method reads, which the engine remembers
      from one block to the next; 0 for none.
    protects: last tokens that always stay, whatever the budget.
    accumulates: the cache remembers the attention that every token receives.
    renumbers: what is kept is numbered and rotated by its place in the cache.
    stochastic: the choice depends on a seed.
    keeps_all: nothing is ever evicted.
    keeps_layers: layers that keep everything.
    reuse: so many layers, one after another, keep what the first of them
      chose.
    activations: those of `kvjax.activations.OPTIONAL` that scores depend on.
  """

  whole_prompts_only: str = ""
  even: str = ""
  window: int = 0
  protects: int = 0
  accumulates: bool = False
  renumbers: bool = False
  stochastic: bool = False
  keeps_all: bool = False
  keeps_layers: tuple[int, ...] = ()
  reuse: int = 1
  activations: frozenset[str] = frozenset()

  def __post_init__(self) -> None:
    for name, least in (("window", 0), ("protects", 0), ("reuse", 1)):
      if getattr(self, name) < least:
        raise InputError(
          f"{name} of a method's traits must be {least} or more; "
          f"{getattr(self, name)} is not."
        )
    unknown = sorted(self.activations - {*OPTIONAL})
    if unknown:
      raise InputError(
        f"A method can read {', '.join(OPTIONAL)} besides queries, keys and "
        f"values; its traits ask for {', '.join(unknown)}."
      )

  def keeps_layer(self, layer: int) -> bool:
    """Whether this layer's cache is never compressed."""
    return self.keeps_all or layer in self.keeps_layers

  def source_layer(self, layer: int) -> int:
    """The layer, this one or one before, whose choice this layer copies."""
    return layer - layer % self.reuse
