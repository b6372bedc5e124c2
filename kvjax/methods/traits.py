"""Declarations of what a method requires and does not support."""

import dataclasses
from collections.abc import Collection
from typing import Any

from kvjax.activations import OPTIONAL
from kvjax.errors import InputError
from kvjax.methods.channels import Channels
from kvjax.methods.replay import Replay
from kvjax.options.bounds import check_count


@dataclasses.dataclass(frozen=True)
class Traits:
  """Properties of a method that the engine and the checks rely on.

  Raises InputError where a number or a layer is negative, or an activation is
  unknown.

  Attributes:
    whole_prompts_only: why the method cannot evict in blocks or while decoding,
      as the end of a sentence; empty if it can.
    even: why layers and heads must have equal shares of a budget, as the end of
      a sentence; empty if they need not.
    coarse: why heads may keep fewer tokens than their budget, as the end of a
      sentence; empty if they never do.
    window: W, number of last queries that the method reads, which the engine
      carries from block to block; 0 for none.
    protects: number of last tokens that are kept before others: all of them if
      the budget has room, else the newest.
    sinks: number of first tokens that are kept besides these, if there is room.
    renumbers: whether kept tokens are renumbered by their place in the cache.
    stochastic: whether the selection depends on a seed.
    positional: whether the selection depends on positions alone.
    weighs: whether scores are weights of 0 or more that values have no part in,
      such as attention.
    keeps_all: whether nothing is ever evicted.
    keeps_layers: layers that keep everything.
    reuse: number of consecutive layers that share the selection of the first.
    joins_heads: whether the heads of a layer keep the same tokens, by scores of
      all of them together.
    joins_layers: whether all layers keep the same tokens, which are selected
      once, by what `Method.join` makes of the scores of all layers.
    queries: number of the prompt's last queries that scores and channels depend
      on; None for all of them. A prefill of whole prompts does not hold the
      others.
    activations: those of `kvjax.activations.OPTIONAL` that scores depend on.
    observes: those of `activations` that only `Method.observe` reads where
      tokens are evicted between blocks and while decoding; later evictions do
      without them.
    replay: how the prompt is replayed for `Activations.replayed`, if at all.
    channels: which channels of the kept keys are stored, if not all.
    score_range: lowest and highest score, if a score means the same in all
      prompts, layers and heads, so that a threshold can be set; else None. By
      definition, or of the texts that a learned method was tested with.
  """

  whole_prompts_only: str = ""
  even: str = ""
  coarse: str = ""
  window: int = 0
  protects: int = 0
  sinks: int = 0
  renumbers: bool = False
  stochastic: bool = False
  positional: bool = False
  weighs: bool = False
  keeps_all: bool = False
  keeps_layers: tuple[int, ...] = ()
  reuse: int = 1
  joins_heads: bool = False
  joins_layers: bool = False
  queries: int | None = None
  activations: frozenset[str] = frozenset()
  observes: frozenset[str] = frozenset()
  replay: Replay | None = None
  channels: Channels | None = None
  score_range: tuple[float, float] | None = None

  def __post_init__(self) -> None:
    check_count("window of a method's traits", self.window, 0)
    check_count("protects of a method's traits", self.protects, 0)
    check_count("sinks of a method's traits", self.sinks, 0)
    check_count("reuse of a method's traits", self.reuse)
    self._check_queries()
    # A set or a list would make the traits unhashable.
    kinds = (
      ("activations", frozenset),
      ("observes", frozenset),
      ("keeps_layers", tuple),
    )
    for name, make in kinds:
      given: Any = getattr(self, name)
      if isinstance(given, str):
        raise InputError(f"{name} of a method's traits is a set of names.")
      object.__setattr__(self, name, make(given))
    for layer in self.keeps_layers:
      check_count("A layer that a method keeps whole", layer, 0)
    unknown = sorted(self.activations - {*OPTIONAL})
    if unknown:
      raise InputError(
        f"A method can read {', '.join(OPTIONAL)} besides queries, keys and "
        f"values; its traits ask for {', '.join(unknown)}."
      )
    undeclared = sorted(self.observes - self.activations)
    if undeclared:
      raise InputError(
        "What a method observes is among the activations of its traits; "
        f"{', '.join(undeclared)} is not."
      )

  def _check_queries(self) -> None:
    if self.queries is None:
      return
    check_count("queries of a method's traits", self.queries, 0)
    if self.queries < self.window:
      raise InputError(
        f"A window of {self.window} queries is part of the queries that a "
        f"method reads: queries of its traits must be {self.window} or more, "
        f"or None for all; {self.queries} is not."
      )

  @property
  def always(self) -> frozenset[str]:
    """The activations that every eviction needs, also between blocks."""
    return self.activations - self.observes

  def once(self, reason: str) -> "Traits":
    """The traits of a method that selects from a whole prompt by this one.

    Args:
      reason: why it cannot evict repeatedly; see `whole_prompts_only`.
    """
    return dataclasses.replace(
      self,
      whole_prompts_only=reason,
      window=0,
      protects=0,
      sinks=0,
      observes=frozenset(),
      joins_heads=False,
      score_range=None,
    )

  def keeps_layer(self, layer: int) -> bool:
    """Whether a layer is never compressed."""
    return self.keeps_all or layer in self.keeps_layers

  def source_layer(self, layer: int) -> int:
    """The layer whose selection a layer copies; itself if it copies none."""
    return layer - layer % self.reuse


def most_queries(counts: Collection[int | None]) -> int | None:
  """The most of several numbers of last queries, of which None is all."""
  known = [count for count in counts if count is not None]
  return max(known, default=0) if len(known) == len(counts) else None
