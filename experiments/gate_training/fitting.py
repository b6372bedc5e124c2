"""Fits the network of one layer to the logarithms of scores."""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from kvjax.calibration.rules import r2

Kind = Literal["mlp", "linear"]
# Weights [out, in] and biases [out].
Step = tuple[Float[np.ndarray, "_ _"], Float[np.ndarray, " _"]]

_MOST_NORM = 1.0
# PyTorch's default.
_WEIGHT_DECAY = 0.01
_RIDGE = 1.0


class Examples(NamedTuple):
  """What a layer reads, and the logarithm of each KV head's score."""

  inputs: Float[np.ndarray, "n E"]
  scores: Float[np.ndarray, "n K"]


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The hyperparameters; defaults of `train_gate` are those of KVzap's authors.

  Attributes:
    kind: "mlp" for a hidden layer, or "linear".
    hidden: width of the hidden layer.
    epochs: passes over the examples.
    learning_rate: maximum learning rate, which decays as a cosine.
    batch: examples per step.
    seed: seed of the weights and of the order of examples.
  """

  kind: Kind
  hidden: int
  epochs: int
  learning_rate: float
  batch: int
  seed: int


def fit(examples: Examples, recipe: Recipe, layer: int) -> tuple[Step, ...]:
  """Fits a network; returns its linear steps, in float32.

  "linear" is ridge regression. "mlp" minimizes the mean of squares by AdamW.
  Inputs are standardized for the fit, and the network is that of inputs as they
  are.

  Source: Jegou and Jeblick, arXiv 2601.07891 (KVzap), and their code.
  """
  inputs = np.asarray(examples.inputs, np.float64)
  scores = np.asarray(examples.scores, np.float64)
  if recipe.kind == "linear":
    return (_ridge(inputs, scores),)
  center, scale = inputs.mean(axis=0), inputs.std(axis=0)
  # An input that never changes says nothing.
  scale = np.where(scale > 0, scale, 1.0)
  first, second = _train(
    ((inputs - center) / scale).astype(np.float32),
    scores.astype(np.float32),
    recipe,
    layer,
  )
  weights = first[0] / scale
  biases = first[1] - weights @ center
  return (weights.astype(np.float32), biases.astype(np.float32)), second


def predict(
  steps: tuple[Step, ...], inputs: Float[np.ndarray, "n E"]
) -> Float[np.ndarray, "n K"]:
  """Predicts the logarithms of scores."""
  found = jnp.asarray(inputs, jnp.float32)
  with jax.default_matmul_precision("highest"):
    for number, (weights, biases) in enumerate(steps):
      found = jax.nn.gelu(found, approximate=False) if number else found
      found = found @ jnp.asarray(weights).T + jnp.asarray(biases)[None]
  return np.asarray(found)


def mean_r2(
  predicted: Float[np.ndarray, "n K"], scores: Float[np.ndarray, "n K"]
) -> float:
  """Computes the coefficient of determination, averaged over the heads."""
  by_head = [
    r2(ours.astype(np.float64), theirs.astype(np.float64))
    for ours, theirs in zip(predicted.T, scores.T, strict=True)
  ]
  return float(np.mean(by_head))


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
  scores: Float[np.ndarray, "n K"],
  recipe: Recipe,
  layer: int,
) -> tuple[Step, Step]:
  """Trains a network with a hidden layer on standardized inputs."""
  count, width = inputs.shape
  batch = min(recipe.batch, count)
  steps = count // batch
  draw = np.random.default_rng((recipe.seed, layer))

  def uniform(*shape: int, of: int) -> Float[Array, "..."]:
    drawn = draw.uniform(-1.0, 1.0, shape) * of**-0.5
    return jnp.asarray(drawn.astype(np.float32))

  weights = (
    (uniform(recipe.hidden, width, of=width), uniform(recipe.hidden, of=width)),
    (
      uniform(scores.shape[1], recipe.hidden, of=recipe.hidden),
      jnp.asarray(scores.mean(axis=0)),
    ),
  )
  schedule = _Schedule(recipe.learning_rate, recipe.epochs * steps)
  moments = _optimizer(schedule).init(weights)
  data = jnp.asarray(inputs), jnp.asarray(scores)
  for _ in range(recipe.epochs):
    order = draw.permutation(count)[: steps * batch].reshape(steps, batch)
    weights, moments = _epoch(
      weights, moments, *data, jnp.asarray(order, jnp.int32), schedule=schedule
    )
  first, second = jax.device_get(weights)
  return first, second


class _Schedule(NamedTuple):
  """Learning rates: cosine decay to zero."""

  peak: float
  steps: int


def _optimizer(schedule: _Schedule) -> optax.GradientTransformation:
  rates = optax.cosine_decay_schedule(schedule.peak, schedule.steps)
  return optax.chain(
    optax.clip_by_global_norm(_MOST_NORM),
    optax.adamw(rates, weight_decay=_WEIGHT_DECAY),
  )


_Weights = tuple[tuple[Array, Array], tuple[Array, Array]]


@functools.partial(
  jax.jit, static_argnames="schedule", donate_argnames=("weights", "moments")
)
def _epoch(
  weights: _Weights,
  moments: optax.OptState,
  inputs: Float[Array, "n E"],
  scores: Float[Array, "n K"],
  order: Int[Array, "T b"],
  *,
  schedule: _Schedule,
) -> tuple[_Weights, optax.OptState]:
  """Takes a step for each of T batches of b examples."""

  def loss(weights: _Weights, batch: Int[Array, " b"]) -> Float[Array, ""]:
    (first, at_first), (second, at_second) = weights
    hidden = inputs[batch] @ first.T + at_first[None]
    hidden = jax.nn.gelu(hidden, approximate=False)
    found = hidden @ second.T + at_second[None]
    return jnp.mean((found - scores[batch]) ** 2)

  def step(
    carry: tuple[_Weights, optax.OptState], batch: Int[Array, " b"]
  ) -> tuple[tuple[_Weights, optax.OptState], None]:
    weights, moments = carry
    gradients = jax.grad(loss)(weights, batch)
    # Adam's bias correction raises a float to an integer power, a promotion.
    with jax.numpy_dtype_promotion("standard"):
      update = _optimizer(schedule).update(gradients, moments, weights)
    updates, moments = update
    return (optax.apply_updates(weights, updates), moments), None

  (weights, moments), _ = jax.lax.scan(step, (weights, moments), order)
  return weights, moments
