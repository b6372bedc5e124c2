"""Times the scores of methods."""

import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.experiments.run import stopwatch
from kvjax.methods.base import Method

Scorer = Callable[[LayerCache, Activations], PyTree[Array]]


def scorer_of(method: Method) -> Scorer:
  """Returns the scores of a method as a function of a layer's cache."""

  def score(cache: LayerCache, activations: Activations) -> PyTree[Array]:
    # Not before: hosts meet before anything is on a device.
    return method.evaluate(jnp.zeros((), jnp.int32), cache, activations)

  return score


def seconds_of(
  scorer: Scorer, cache: LayerCache, activations: Activations
) -> float:
  """Compiles a scorer and measures the median wall time of its calls."""
  compiled = jax.jit(scorer)
  return median_seconds(lambda: compiled(cache, activations))


def median_seconds(run: Callable[[], PyTree[Array]], rounds: int = 5) -> float:
  """Measures the median wall time of calls, after one that compiles.

  Args:
    run: the function to time, until its results are ready.
    rounds: number of calls.
  """
  return statistics.median(stopwatch.repeated(run, rounds))
