"""Learns KVzap's networks: each layer's logarithms of KVzip+ scores."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from kvjax.experiments.gate_training.descent import Descent, descend
from kvjax.experiments.gate_training.learner import Examples, Learner, Weights
from kvjax.methods.kvzap_gate import CONFIG, WEIGHTS, KVzapGate
from kvjax.methods.replay import Weight

Kind = Literal["mlp", "linear"]
# Weights [out, in] and biases [out].
Step = tuple[Float[np.ndarray, "_ _"], Float[np.ndarray, " _"]]

_MOST_NORM = 1.0
# PyTorch's default.
_WEIGHT_DECAY = 0.01
_RIDGE = 1.0
# Scores of zero have no logarithm.
_LEAST = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVzapLearner(Learner):
  """The hyperparameters of KVzap's networks, and their fit.

  Source: Jegou and Jeblick, arXiv 2601.07891 (KVzap), and their code.

  Attributes:
    kind: "mlp" for a hidden layer, or "linear".
    hidden: width of the hidden layer.
    epochs: passes over the examples, in which the learning rate decays as a
      cosine.
  """

  weight: ClassVar[Weight] = "output"
  files: ClassVar[Sequence[str]] = (CONFIG, WEIGHTS)

  kind: Kind
  hidden: int
  epochs: int

  def targets(
    self, scores: Float[np.ndarray, "..."]
  ) -> Float[np.ndarray, "..."]:
    """Takes the logarithms."""
    return np.log(np.maximum(scores, _LEAST))

  def fit(self, examples: Examples, layer: int) -> Weights:
    """Fits a network.

    "linear" is ridge regression. "mlp" minimizes the mean of squares by AdamW.
    Inputs are standardized for the fit, and the network is that of inputs as
    they are.
    """
    inputs = np.asarray(examples.inputs, np.float64)
    targets = np.asarray(examples.targets, np.float64)
    if self.kind == "linear":
      return _by_name([_ridge(inputs, targets)])
    center, scale = inputs.mean(axis=0), inputs.std(axis=0)
    # An input that never changes says nothing.
    scale = np.where(scale > 0, scale, 1.0)
    first, second = _train(
      ((inputs - center) / scale).astype(np.float32),
      targets.astype(np.float32),
      self,
      layer,
    )
    weights = first[0] / scale
    biases = first[1] - weights @ center
    first = weights.astype(np.float32), biases.astype(np.float32)
    return _by_name([first, second])

  def predict(
    self, weights: Weights, inputs: Float[np.ndarray, "n E"]
  ) -> Float[np.ndarray, "n K"]:
    """Predicts the logarithms of scores."""
    steps = tuple((w[None], b[None]) for w, b in _steps(weights))
    with jax.default_matmul_precision("highest"):
      found = KVzapGate.predict(
        steps, jnp.int32(0), jnp.asarray(inputs, jnp.float32)[None]
      )
    return np.asarray(found[0]).T

  def gate(
    self, layers: Sequence[Weights], score_range: tuple[float, float]
  ) -> KVzapGate:
    """Joins the networks of all layers."""
    steps = tuple(
      (np.stack([w for w, _ in step]), np.stack([b for _, b in step]))
      for step in zip(*map(_steps, layers), strict=True)
    )
    return KVzapGate(steps, score_range)


def _by_name(steps: Sequence[Step]) -> Weights:
  return {
    f"{name}{number}": array
    for number, step in enumerate(steps)
    for name, array in zip(("weight", "bias"), step, strict=True)
  }


def _steps(weights: Weights) -> list[Step]:
  count = len(weights) // 2
  return [(weights[f"weight{n}"], weights[f"bias{n}"]) for n in range(count)]


def _ridge(
  inputs: Float[np.ndarray, "n E"], scores: Float[np.ndarray, "n K"]
) -> Step:
  """Ridge regression with an intercept that is not penalized."""
  center, mean = inputs.mean(axis=0), scores.mean(axis=0)
  x, y = inputs - center, scores - mean
  products = x.T @ x + _RIDGE * np.eye(x.shape[1])
  weights = np.linalg.solve(products, x.T @ y).T
  biases = mean - weights @ center
  return weights.astype(np.float32), biases.astype(np.float32)


def _train(
  inputs: Float[np.ndarray, "n E"],
  targets: Float[np.ndarray, "n K"],
  learner: KVzapLearner,
  layer: int,
) -> tuple[Step, Step]:
  """Trains a network with a hidden layer on standardized inputs."""
  width, hidden = inputs.shape[1], learner.hidden
  draw = np.random.default_rng((learner.seed, layer))

  def uniform(*shape: int, of: int) -> Float[Array, "..."]:
    drawn = draw.uniform(-1.0, 1.0, shape) * of**-0.5
    return jnp.asarray(drawn.astype(np.float32))

  start = (
    (uniform(hidden, width, of=width), uniform(hidden, of=width)),
    (
      uniform(targets.shape[1], hidden, of=hidden),
      jnp.asarray(targets.mean(axis=0)),
    ),
  )
  examples = Examples(inputs, targets)
  descent = Descent(_loss, _optimizer, learner.learning_rate)
  first, second = descend(
    descent, start, examples, learner.batch, learner.epochs, draw
  )
  return first, second


def _loss(
  weights: tuple[tuple[Array, Array], tuple[Array, Array]],
  inputs: Float[Array, "b E"],
  targets: Float[Array, "b K"],
) -> Float[Array, ""]:
  (first, at_first), (second, at_second) = weights
  hidden = inputs @ first.T + at_first[None]
  hidden = jax.nn.gelu(hidden, approximate=False)
  found = hidden @ second.T + at_second[None]
  return jnp.mean((found - targets) ** 2)


def _optimizer(rate: float, steps: int) -> optax.GradientTransformation:
  rates = optax.cosine_decay_schedule(rate, steps)
  return optax.chain(
    optax.clip_by_global_norm(_MOST_NORM),
    optax.adamw(rates, weight_decay=_WEIGHT_DECAY),
  )
