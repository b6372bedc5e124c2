"""KVzap: keep what a small network of each layer predicts to be needed."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.methods.base import ScoringMethod
from kvjax.methods.kvzap_gate import KVzapGate
from kvjax.methods.kvzip import Level, shared_by
from kvjax.methods.traits import Traits
from kvjax.model import Geometry

# Logarithms have no bounds.
_ANY = (-math.inf, math.inf)


@dataclasses.dataclass(frozen=True)
class KVzap(ScoringMethod):
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
  """

  gate: str = ""
  level: Level = "head"

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.gate:
      _ = self._weights

  @property
  def traits(self) -> Traits:
    """It reads the layers' inputs."""
    return Traits(
      whole_prompts_only="it reads the inputs of layers, which no cache stores",
      activations=frozenset({"inputs"}),
      score_range=self._weights.score_range if self.gate else _ANY,
    )

  @property
  def allocation(self) -> Allocation:
    """The allocation that `level` defines."""
    return shared_by(self.level)

  def check_model(self, geometry: Geometry) -> None:
    """Refuses a model with other layers or KV heads than the weights."""
    self._weights.check(geometry)

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Predicts the scores of the tokens."""
    assert activations.inputs is not None
    scores = self._weights.predict(layer, activations.inputs)
    # Query heads that store keys of their own have the score of their group.
    groups = cache.keys.shape[1] // scores.shape[1]
    return jnp.repeat(scores, groups, axis=1)

  @property
  def _weights(self) -> KVzapGate:
    if not self.gate:
      raise InputError(
        "KVzap scores tokens by learned weights; give their folder, as in "
        "kvzap:gate=DIR, which kvjax train_gate writes."
      )
    return KVzapGate.read(self.gate)
