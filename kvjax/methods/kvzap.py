"""KVzap: keep what a small network of each layer predicts to be needed."""

import dataclasses
import math
from typing import ClassVar

from kvjax.methods.gated import GatedMethod
from kvjax.methods.kvzap_gate import KVzapGate
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least

# Logarithms have no bounds.
_ANY = (-math.inf, math.inf)


@dataclasses.dataclass(frozen=True)
class KVzap(GatedMethod):
  """Scores a token by what a learned network makes of the layer's input.

  The network, a linear map or one with a hidden layer, predicts the logarithm
  of the score that `KVzip` with weight "output" (KVzip+) gives a token, without
  replaying the prompt. The score of a token depends on this token's input
  alone. It means the same in all prompts, layers and heads, so that the budget
  may be a `kvjax.Threshold`.

  Source: Jegou and Jeblick, arXiv 2601.07891.

  Attributes:
    gate: folder with the weights of the model's network, as they are published
      or as the program train_gate writes them; see `KVzapGate`.
    level: heads that share a budget: those of the "model" or of a "layer", or
      none, so that each "head" keeps as many tokens.
    recent: number of last tokens that are always kept.
  """

  recent: int = 0

  kind: ClassVar[type[KVzapGate]] = KVzapGate
  missing: ClassVar[str] = (
    "KVzap scores tokens by learned weights; give their folder, as in "
    "kvzap:gate=DIR, which kvjax train_gate writes."
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, recent=0)

  @property
  def traits(self) -> Traits:
    """It reads the layers' inputs, and keeps the last tokens."""
    return dataclasses.replace(super().traits, protects=self.recent)

  @property
  def score_range(self) -> tuple[float, float]:
    """That of the texts which the weights were tested with, if it is known."""
    return self.kind.read(self.gate).score_range if self.gate else _ANY
