"""What learns the gates of a method, from examples of each layer."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float

from kvjax.calibration.rules import r2
from kvjax.methods.fast_kvzip_gate import FastKVzipGate
from kvjax.methods.kvzap_gate import KVzapGate
from kvjax.methods.replay import Weight

# Weights of the gate of a layer, by name.
Weights = Mapping[str, Float[np.ndarray, "..."]]


class Examples(NamedTuple):
  """What a layer reads of some tokens, and what is learned of each KV head."""

  inputs: Float[np.ndarray, "n E"]
  targets: Float[np.ndarray, "n K"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner(abc.ABC):
  """Fits the gates of a method; its fields identify a run.

  Attributes:
    kind: kind of the gates.
    learning_rate: maximum learning rate.
    batch: examples per step.
    seed: seed of the weights and of the order of examples.
    weight: what attention is multiplied by in the replays that are learned.
    files: names of the files that a gate is saved to.
  """

  weight: ClassVar[Weight]
  files: ClassVar[Sequence[str]]

  kind: str
  learning_rate: float
  batch: int
  seed: int

  @abc.abstractmethod
  def targets(
    self, scores: Float[np.ndarray, "..."]
  ) -> Float[np.ndarray, "..."]:
    """Computes what is learned of the scores of a replay."""

  @abc.abstractmethod
  def fit(self, examples: Examples, layer: int) -> Weights:
    """Fits the gate of a layer; its weights are float32."""

  @abc.abstractmethod
  def predict(
    self, weights: Weights, inputs: Float[np.ndarray, "n E"]
  ) -> Float[np.ndarray, "n K"]:
    """Predicts the targets."""

  @abc.abstractmethod
  def gate(
    self, layers: Sequence[Weights], score_range: tuple[float, float]
  ) -> KVzapGate | FastKVzipGate:
    """Joins the gates of all layers.

    Args:
      layers: weights of each layer.
      score_range: the lowest and the highest prediction for other texts.
    """


def mean_r2(
  predicted: Float[np.ndarray, "n K"], targets: Float[np.ndarray, "n K"]
) -> float:
  """Computes the coefficient of determination, averaged over the heads."""
  by_head = [
    r2(ours.astype(np.float64), theirs.astype(np.float64))
    for ours, theirs in zip(predicted.T, targets.T, strict=True)
  ]
  return float(np.mean(by_head))
