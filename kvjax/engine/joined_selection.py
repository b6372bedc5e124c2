"""Selections that all layers share: their scores are joined first."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from kvjax.activations import Activations
from kvjax.allocation.base import LayerBudget
from kvjax.cache.layers import LayerCache
from kvjax.engine.compress import Evaluated, Evaluation, candidates_of
from kvjax.errors import blamed_on
from kvjax.methods.base import Method


def select_joined(
  method: Method, scores: PyTree[Array], cache: LayerCache, budget: LayerBudget
) -> Int[Array, "B K M"]:
  """Selects the slots that all layers keep, ascending, then -1.

  Args:
    method: a method whose traits say that it joins layers.
    scores: results of its evaluations, with a leading axis of layers.
    cache: the candidates in one of the layers.
    budget: how many slots to keep.
  """
  with blamed_on(method):
    with jax.default_matmul_precision("highest"):
      joined = method.join(scores, cache, budget)
    return method.select(joined, cache, budget)


@functools.partial(jax.jit, static_argnames=("evaluation",))
def select_from_prompt(
  evaluation: Evaluation,
  activations: Activations,
  evaluated: Sequence[Evaluated],
  budget: LayerBudget,
) -> Int[Array, "B K T"]:
  """Selects the slots of a prompt that all layers keep; see `select_layer`.

  Args:
    evaluation: the method.
    activations: activations of the prompt in the first of the layers.
    evaluated: results of the evaluations of the layers.
    budget: how many slots to keep; its capacity is T.
  """
  cache = candidates_of(evaluation, activations, evaluated[0])
  scores = [of_layer.scores for of_layer in evaluated]
  stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *scores)
  return select_joined(evaluation.method, stacked, cache, budget)
