"""Methods whose scores learned gates predict from the inputs of layers."""

import abc
import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.methods.base import ScoringMethod
from kvjax.methods.kvzip import Level, shared_by
from kvjax.methods.traits import Traits
from kvjax.model import Geometry


class Gate(abc.ABC):
  """The weights of a network for each layer of a model.

  Attributes:
    path: where they were read from.
  """

  path: str

  @property
  @abc.abstractmethod
  def layers(self) -> int:
    """L, number of layers."""

  @property
  @abc.abstractmethod
  def heads(self) -> int:
    """K, number of KV heads."""

  @property
  @abc.abstractmethod
  def width(self) -> int:
    """E, width of the layers' inputs."""

  @property
  @abc.abstractmethod
  def arrays(self) -> PyTree:
    """The weights of all layers, as `predict` takes them."""

  @classmethod
  @abc.abstractmethod
  def read(cls, path: str) -> Self:
    """Reads the files; see `read_once`."""

  @staticmethod
  @abc.abstractmethod
  def predict(
    weights: Any, layer: Int[Array, ""], inputs: Float[Array, "B S E"]
  ) -> Float[Array, "B K S"]:
    """Predicts the scores of tokens in a layer, in float32.

    Args:
      weights: `arrays` of a gate, in a program that gates of one size share.
      layer: index of the layer.
      inputs: the layer's normalized inputs.
    """

  def check(self, geometry: Geometry) -> None:
    """Refuses a model with other layers or KV heads.

    Raises:
      InputError: they differ.
    """
    heads = {spec.kv_heads for spec in geometry.layers if spec.compressible}
    if self.layers != geometry.num_layers or not heads <= {self.heads}:
      of_model = " and ".join(map(str, sorted(heads)))
      raise InputError(
        f"{self.path} is of another model: it scores {self.heads} KV heads in "
        f"{self.layers} layers, and this model has {of_model} KV heads in "
        f"{geometry.num_layers} layers."
      )

  def check_width(self, inputs: Float[Array, "B S E"]) -> None:
    """Refuses inputs of another width.

    Raises:
      InputError: it differs.
    """
    if inputs.shape[-1] != self.width:
      raise InputError(
        f"{self.path} is of another model: it reads inputs of {self.width} "
        f"numbers, and this model's have {inputs.shape[-1]}."
      )


@dataclasses.dataclass(frozen=True)
class GatedMethod(ScoringMethod):
  """Scores a token by what a gate makes of its input to the layer.

  Between blocks and while decoding, every token is scored once, when it enters
  the cache, which stores its score.

  Attributes:
    gate: where the weights of the model's gates are.
    level: heads that share a budget; see `KVzip`.
    kind: the gates.
  """

  gate: str = ""
  level: Level = "model"

  kind: ClassVar[type[Gate]]
  # What is said where no weights are named.
  missing: ClassVar[str]

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.gate:
      _ = self.read()

  def read(self) -> Gate:
    """Reads the weights, unless they have been read.

    Raises:
      InputError: none are named, or they cannot be read.
    """
    if not self.gate:
      raise InputError(self.missing)
    return self.kind.read(self.gate)

  @property
  def traits(self) -> Traits:
    """It reads the layers' inputs, once."""
    shared = (
      "its heads share a budget once the prompt is known; with level=head, "
      "each has its own"
    )
    inputs = frozenset({"inputs"})
    return Traits(
      whole_prompts_only="" if self.level == "head" else shared,
      queries=0,
      activations=inputs,
      observes=inputs,
      score_range=self.score_range,
    )

  @property
  @abc.abstractmethod
  def score_range(self) -> tuple[float, float]:
    """The lowest and the highest score that a gate may give."""

  @property
  def allocation(self) -> Allocation:
    """The allocation that `level` defines."""
    return shared_by(self.level)

  def check_model(self, geometry: Geometry) -> None:
    """Refuses a model with other layers or KV heads than the weights.

    Raises:
      InputError: they differ, or there are no weights.
    """
    self.read().check(geometry)

  def check_activations(self, activations: Activations) -> None:
    """Refuses inputs of another width than the weights'.

    Raises:
      InputError: it differs.
    """
    assert activations.inputs is not None
    self.read().check_width(activations.inputs)

  def load(self) -> PyTree:
    """Returns the weights."""
    return self.read().arrays

  def without_files(self) -> Self:
    """Names no gate."""
    return dataclasses.replace(self, gate="")

  def observe(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> LayerCache:
    """Stores the scores of a block, which the cache ends with."""
    scores = self._predict(layer, cache, activations)
    remembered = cache.remembered
    if remembered is None:
      remembered = jnp.zeros(cache.positions.shape, jnp.float32)
    start = cache.cursor - scores.shape[2]
    remembered = jax.lax.dynamic_update_slice_in_dim(
      remembered, scores, start, axis=2
    )
    return dataclasses.replace(cache, remembered=remembered)

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """The scores that are stored, or those of a prompt."""
    if cache.remembered is not None:
      return cache.remembered
    return self._predict(layer, cache, activations)

  def _predict(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K S"]:
    """Predicts the scores of a block."""
    assert activations.inputs is not None
    weights = self.weights_of(activations)
    scores = self.kind.predict(weights, layer, activations.inputs)
    # Query heads that store keys of their own have the score of their group.
    groups = cache.keys.shape[1] // scores.shape[1]
    return jnp.repeat(scores, groups, axis=1)
