"""Learns the gates of Fast KVzip: each layer's KVzip scores."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from kvjax.experiments.gate_training.learner import Examples, Learner, Weights
from kvjax.methods.fast_kvzip_gate import WEIGHTS, FastKVzipGate
from kvjax.methods.replay import Weight

# Numbers of a query, and learned keys of a head, of all published gates.
_SIZE, _KEYS = 16, 16
_STEPS = 5000
_MOMENTUM = 0.9
# The logarithm of a smaller score or complement is cut.
_LEAST = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastKVzipLearner(Learner):
  """The hyperparameters of Fast KVzip's gates, and their fit.

  Stochastic gradient descent with momentum minimizes the binary cross-entropy
  of scores and predictions. The learning rate rises in the first hundredth of
  the steps, and is halved after half and after three quarters of them.

  Source: Kim et al., arXiv 2601.17668, and their code, whose training adds b
  twice; here it is added once, as where the gates are used. The start of the
  learned keys is ours, as is that of b, at which a head predicts about its
  mean.

  Attributes:
    group: G, query heads of a KV head.
    epochs: passes over the examples; None for 5,000 steps.
  """

  weight: ClassVar[Weight] = "attention"
  files: ClassVar[Sequence[str]] = (WEIGHTS,)

  group: int
  epochs: int | None = None
  kind: Literal["fast_kvzip"] = "fast_kvzip"

  def targets(
    self, scores: Float[np.ndarray, "..."]
  ) -> Float[np.ndarray, "..."]:
    """Takes the scores as they are, between 0 and 1."""
    return scores

  def fit(self, examples: Examples, layer: int) -> Weights:
    """Fits a gate."""
    inputs, targets = examples
    draw = np.random.default_rng((self.seed, layer))
    batch = min(self.batch, len(inputs))
    by_epoch = len(inputs) // batch
    epochs = self.epochs or -(-_STEPS // by_epoch)
    weights = _start(draw, inputs.shape[1], targets, self.group)
    schedule = _Schedule(self.learning_rate, epochs * by_epoch)
    moments = _optimizer(schedule).init(weights)
    data = jnp.asarray(inputs, jnp.float32), jnp.asarray(targets, jnp.float32)
    for _ in range(epochs):
      order = draw.permutation(len(inputs))[: by_epoch * batch]
      batches = jnp.asarray(order.reshape(by_epoch, batch), jnp.int32)
      weights, moments = _epoch(
        weights, moments, *data, batches, schedule=schedule
      )
    found: Weights = jax.device_get(weights)
    return found

  def predict(
    self, weights: Weights, inputs: Float[np.ndarray, "n E"]
  ) -> Float[np.ndarray, "n K"]:
    """Predicts the scores."""
    on_device = {name: jnp.asarray(w) for name, w in weights.items()}
    return np.asarray(_predict(on_device, jnp.asarray(inputs, jnp.float32)))

  def gate(
    self, layers: Sequence[Weights], score_range: tuple[float, float]
  ) -> FastKVzipGate:
    """Joins the gates of all layers; any of their scores may be 0 to 1."""
    del score_range
    weights = {n: np.stack([each[n] for each in layers]) for n in layers[0]}
    return FastKVzipGate(weights, "")


def _start(
  draw: np.random.Generator,
  width: int,
  targets: Float[np.ndarray, "n K"],
  group: int,
) -> dict[str, Float[Array, "..."]]:
  """The weights before the first step."""
  heads = targets.shape[1]
  uniform = functools.partial(draw.uniform, -(width**-0.5), width**-0.5)
  mean = np.clip(targets.mean(axis=0), _LEAST, 1 - _LEAST)
  # Without products, a score is 1 / (1 + H exp(-b)) of H learned keys.
  start = np.log(mean / (1 - mean)) + np.log(_KEYS)
  weights = {
    "q_proj.weight": uniform((heads * group * _SIZE, width)),
    "q_proj.bias": uniform(heads * group * _SIZE),
    "k_proj.weight": uniform((heads * _SIZE, width)),
    "q_norm.weight": np.ones(_SIZE),
    "k_norm.weight": np.ones(_SIZE),
    "k_base": draw.standard_normal((heads, 1, _KEYS, _SIZE)),
    "b": np.broadcast_to(start[:, None, None], (heads, 1, group)),
  }
  return {n: jnp.asarray(w, jnp.float32) for n, w in weights.items()}


def _predict(
  weights: Mapping[str, Float[Array, "..."]], inputs: Float[Array, "n E"]
) -> Float[Array, "n K"]:
  of_layer = {name: weight[None] for name, weight in weights.items()}
  with jax.default_matmul_precision("highest"):
    found = FastKVzipGate.predict(of_layer, jnp.int32(0), inputs[None])
  return found[0].T


class _Schedule(NamedTuple):
  """Learning rates: a rise, then the peak, half and a quarter of it."""

  peak: float
  steps: int


def _optimizer(schedule: _Schedule) -> optax.GradientTransformation:
  peak, steps = schedule
  rise = max(1, steps // 100)
  rates = optax.join_schedules(
    [
      optax.linear_schedule(0.0, peak, rise),
      optax.piecewise_constant_schedule(
        peak, {max(1, steps * share // 4 - rise): 0.5 for share in (2, 3)}
      ),
    ],
    [rise],
  )
  return optax.sgd(rates, momentum=_MOMENTUM)


@functools.partial(
  jax.jit, static_argnames="schedule", donate_argnames=("weights", "moments")
)
def _epoch(
  weights: dict[str, Float[Array, "..."]],
  moments: optax.OptState,
  inputs: Float[Array, "n E"],
  targets: Float[Array, "n K"],
  order: Int[Array, "T b"],
  *,
  schedule: _Schedule,
) -> tuple[dict[str, Float[Array, "..."]], optax.OptState]:
  """Takes a step for each of T batches of b examples."""

  def loss(
    weights: dict[str, Float[Array, "..."]], batch: Int[Array, " b"]
  ) -> Float[Array, ""]:
    found = _predict(weights, inputs[batch])
    found = jnp.clip(found, _LEAST, 1 - _LEAST)
    wanted = targets[batch]
    gain = wanted * jnp.log(found) + (1 - wanted) * jnp.log1p(-found)
    return -jnp.mean(gain)

  def step(
    carry: tuple[dict[str, Float[Array, "..."]], optax.OptState],
    batch: Int[Array, " b"],
  ) -> tuple[tuple[dict[str, Float[Array, "..."]], optax.OptState], None]:
    weights, moments = carry
    gradients = jax.grad(loss)(weights, batch)
    with jax.numpy_dtype_promotion("standard"):
      updates, moments = _optimizer(schedule).update(gradients, moments)
    return (optax.apply_updates(weights, updates), moments), None

  (weights, moments), _ = jax.lax.scan(step, (weights, moments), order)
  return weights, moments
