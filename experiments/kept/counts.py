"""Counts the heads that keep or read each token of a text."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

import kvjax
from kvjax.activations import Activations
from kvjax.cache.base import Layer
from kvjax.cache.sparse import SparseLayer
from kvjax.engine.forward import hidden_states
from kvjax.errors import InputError
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.retrieval_quality import retrieved
from kvjax.model import Model


class Kept(NamedTuple):
  """The tokens that a candidate keeps of a text of n tokens.

  Attributes:
    candidate: the candidate.
    heads: number of KV heads of each layer that keep each token; for retrieval
      methods, which keep all, the number that read it for the last token.
    cache_bytes: bytes of the cache.
    full_bytes: bytes of the full cache.
  """

  candidate: Candidate
  heads: Int[np.ndarray, "L n"]
  cache_bytes: int
  full_bytes: int

  @property
  def reads(self) -> bool:
    """Whether `heads` counts heads that read a token."""
    return self.candidate.plan.sparse is not None


def kept(
  model: Model,
  params: PyTree,
  tokens: Sequence[int],
  candidates: Sequence[Candidate],
  repeat_request: kvjax.RepeatRequest | None = None,
) -> list[Kept]:
  """Counts the tokens that each candidate keeps, from one forward pass.

  Args:
    model: the model.
    params: its weights.
    tokens: ids of the text.
    candidates: methods at budgets, for whole prompts.
    repeat_request: for methods that let the model repeat the text.

  Raises:
    InputError: the text is longer than the model's context, or a method
      renumbers the tokens it keeps.
  """
  for candidate in candidates:
    if candidate.plan.method.traits.renumbers:
      raise InputError(
        f"{candidate.method} renumbers what it keeps, which then names no "
        "tokens of the text; without rerotate it keeps the same."
      )
  prompts = kvjax.Prompts.of(
    [tokens], len(tokens), repeat_request=repeat_request
  )
  everything = kvjax.get_plan("full", kvjax.Retention(1.0))
  plans = [candidate.plan for candidate in candidates]
  (full, *caches), _ = kvjax.sweep(model, params, prompts, [everything, *plans])
  last: Sequence[Activations | None] = [None] * len(full.layers)
  if any(plan.sparse is not None for plan in plans):
    last = _last_activations(model, params, full, tokens[-1])
  return [
    Kept(candidate, _head_counts(cache, last), cache.nbytes, full.nbytes)
    for candidate, cache in zip(candidates, caches, strict=True)
  ]


def _head_counts(
  cache: kvjax.Cache, last: Sequence[Activations | None]
) -> Int[np.ndarray, "L n"]:
  """Counts the KV heads of each layer that attend to each token.

  Args:
    cache: a cache of one row of n tokens.
    last: each layer's activations of the last token, for retrieval.
  """
  tokens = int(cache.next_positions[0])
  counts = [
    np.bincount(_positions(layer, activations), minlength=tokens)
    for layer, activations in zip(cache.layers, last, strict=True)
    if layer is not None
  ]
  return np.stack(counts)


def _positions(layer: Layer, last: Activations | None) -> Int[np.ndarray, " U"]:
  """Returns the positions that heads attend to, concatenated over heads."""
  if not isinstance(layer, SparseLayer):
    heads = layer.row_positions(0)
    return np.array([*itertools.chain.from_iterable(heads)], np.int64)
  assert last is not None
  parts = [layer.resident.positions, _retrieved_positions(layer, last)]
  positions = np.concatenate([np.ravel(x) for x in parts])
  return positions[positions >= 0]


@jax.jit
def _retrieved_positions(
  layer: SparseLayer, token: Activations
) -> Int[Array, "B K F"]:
  """Returns positions of stored tokens that a token reads, -1 for others."""
  return jnp.where(retrieved(layer, token), layer.stored.positions, -1)


def _last_activations(
  model: Model, params: PyTree, full: kvjax.Cache, token: int
) -> tuple[Activations, ...]:
  """Computes each layer's activations of the last token of a full cache."""

  def attend(
    layer: int, state: Layer, activations: Activations
  ) -> tuple[Float[Array, "B N S D"], Activations]:
    del layer
    output, _ = state.attend(activations)
    return output, activations.only(())

  def run(
    params: PyTree, cache: kvjax.Cache, tokens: Int[Array, "B S"]
  ) -> tuple[Activations, ...]:
    positions = cache.next_positions[:, None] - 1
    return hidden_states(
      model, params, tokens, positions, cache.layers, attend
    )[1]

  return jax.jit(run)(params, full, np.array([[token]], np.int32))
