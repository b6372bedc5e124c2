"""Gradient descent over examples in random order."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from kvjax.experiments.gate_training.learner import Examples


class Descent(NamedTuple):
  """What is minimized and how; layers of equal ones share a program.

  Attributes:
    loss: of weights, inputs and targets.
    optimizer: makes the optimizer of a maximum learning rate and a number of
      steps.
    rate: the maximum learning rate.
  """

  loss: Callable[..., Float[Array, ""]]
  optimizer: Callable[[float, int], optax.GradientTransformation]
  rate: float


def steps_per_epoch(count: int, batch: int) -> int:
  """Whole batches of `count` examples; fewer than one batch are one."""
  return count // min(batch, count)


def descend(
  descent: Descent,
  weights: PyTree[Array],
  examples: Examples,
  batch: int,
  epochs: int,
  draw: np.random.Generator,
) -> PyTree[np.ndarray]:
  """Takes a step for every batch of every epoch.

  Args:
    descent: what is minimized and how.
    weights: where to start; donated.
    examples: all of them; those that fill no batch are left out of an epoch.
    batch: examples per step.
    epochs: passes over the examples.
    draw: draws their order.

  Returns:
    The weights after the last step, on the host.
  """
  count = len(examples.inputs)
  by_epoch, batch = steps_per_epoch(count, batch), min(batch, count)
  steps = epochs * by_epoch
  moments = descent.optimizer(descent.rate, steps).init(weights)
  data = [jnp.asarray(x, jnp.float32) for x in examples]
  for _ in range(epochs):
    order = draw.permutation(count)[: by_epoch * batch]
    batches = jnp.asarray(order.reshape(by_epoch, batch), jnp.int32)
    weights, moments = _epoch(
      weights, moments, *data, batches, descent=descent, steps=steps
    )
  found: PyTree[np.ndarray] = jax.device_get(weights)
  return found


@functools.partial(
  jax.jit,
  static_argnames=("descent", "steps"),
  donate_argnames=("weights", "moments"),
)
def _epoch(
  weights: PyTree,
  moments: optax.OptState,
  inputs: Float[Array, "n E"],
  targets: Float[Array, "n K"],
  order: Int[Array, "T b"],
  *,
  descent: Descent,
  steps: int,
) -> tuple[PyTree, optax.OptState]:
  """Takes a step for each of T batches of b examples, of `steps` in all."""
  optimizer = descent.optimizer(descent.rate, steps)

  def step(
    carry: tuple[PyTree, optax.OptState], batch: Int[Array, " b"]
  ) -> tuple[tuple[PyTree, optax.OptState], None]:
    weights, moments = carry
    gradients = jax.grad(descent.loss)(weights, inputs[batch], targets[batch])
    # Adam's bias correction raises a float to an integer power, a promotion.
    with jax.numpy_dtype_promotion("standard"):
      updates, moments = optimizer.update(gradients, moments, weights)
    return (optax.apply_updates(weights, updates), moments), None

  (weights, moments), _ = jax.lax.scan(step, (weights, moments), order)
  return weights, moments
