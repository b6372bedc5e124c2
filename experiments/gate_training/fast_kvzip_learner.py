"""Learns the gates of Fast KVzip: each layer's KVzip scores."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from kvjax.experiments.gate_training.descent import (
  Descent,
  descend,
  steps_per_epoch,
)
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
    by_epoch = steps_per_epoch(len(inputs), self.batch)
    epochs = self.epochs or -(-_STEPS // by_epoch)
    start = _start(draw, inputs.shape[1], targets, self.group)
    descent = Descent(_loss, _optimizer, self.learning_rate)
    found: Weights = descend(descent, start, examples, self.batch, epochs, draw)
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


def _loss(
  weights: Mapping[str, Float[Array, "..."]],
  inputs: Float[Array, "b E"],
  targets: Float[Array, "b K"],
) -> Float[Array, ""]:
  found = jnp.clip(_predict(weights, inputs), _LEAST, 1 - _LEAST)
  gain = targets * jnp.log(found) + (1 - targets) * jnp.log1p(-found)
  return -jnp.mean(gain)


def _optimizer(rate: float, steps: int) -> optax.GradientTransformation:
  """Of a learning rate that rises, and is then whole, a half and a quarter."""
  rise = max(1, steps // 100)
  rates = optax.join_schedules(
    [
      optax.linear_schedule(0.0, rate, rise),
      optax.piecewise_constant_schedule(
        rate, {max(1, steps * share // 4 - rise): 0.5 for share in (2, 3)}
      ),
    ],
    [rise],
  )
  return optax.sgd(rates, momentum=_MOMENTUM)
