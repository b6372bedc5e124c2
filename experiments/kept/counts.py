"""How many heads keep each token of a text, or read it."""

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
from kvjax.experiments.candidates import Candidate
from kvjax.kernels.select import named_slots
from kvjax.model import Model

_Queries = Sequence[Float[Array, "B N D"]]


class Kept(NamedTuple):
  """What a candidate leaves of a text of n tokens.

  Attributes:
    candidate: whose cache.
    heads: how many KV heads of each layer hold each token; of a retrieval
      method, which holds them all, how many read it for the last token.
    cache_bytes: of the cache.
    full_bytes: of the full cache.
  """

  candidate: Candidate
  heads: Int[np.ndarray, "L n"]
  cache_bytes: int
  full_bytes: int

  @property
  def reads(self) -> bool:
    """Whether the heads are those that read a token."""
    return self.candidate.plan.sparse is not None


def kept(
  model: Model,
  params: PyTree,
  tokens: Sequence[int],
  candidates: Sequence[Candidate],
) -> list[Kept]:
  """What each candidate leaves of a text, from one forward pass.

  Args:
    model: the functions.
    params: the weights.
    tokens: ids of the text.
    candidates: methods at budgets for whole prompts.

  Raises:
    InputError: the text is longer than the model's context, or a method
      renumbers what it keeps.
  """
  for candidate in candidates:
    if candidate.plan.method.traits.renumbers:
      raise InputError(
        f"{candidate.method} renumbers what it keeps, which then names no "
        "tokens of the text; without rerotate it keeps the same."
      )
  prompts = kvjax.Prompts.of([tokens], len(tokens))
  whole = kvjax.get_plan("full", kvjax.Retention(1.0))
  plans = [candidate.plan for candidate in candidates]
  (full, *caches), _ = kvjax.sweep(model, params, prompts, [whole, *plans])
  queries = None
  if any(plan.sparse is not None for plan in plans):
    queries = _last_queries(model, params, full, tokens[-1])
  return [
    Kept(candidate, head_counts(cache, queries), cache.nbytes, full.nbytes)
    for candidate, cache in zip(candidates, caches, strict=True)
  ]


def head_counts(
  cache: kvjax.Cache, queries: _Queries | None = None
) -> Int[np.ndarray, "L n"]:
  """How many KV heads of each layer attend to each token.

  Args:
    cache: of one row, which has seen n tokens.
    queries: in each layer, of the last of them; wanted where they look up.
  """
  layers = cache.layers
  each = [None] * len(layers) if queries is None else queries
  seen = int(cache.next_positions[0])
  found = [
    np.bincount(_positions(layer, cache, query), minlength=seen)
    for layer, query in zip(layers, each, strict=True)
    if layer is not None
  ]
  return np.stack(found)


def _positions(
  layer: Layer, cache: kvjax.Cache, query: Float[Array, "B N D"] | None
) -> Int[np.ndarray, " U"]:
  """Where the tokens stood that heads attend to, one head's after another's."""
  if not isinstance(layer, SparseLayer):
    return np.concatenate(layer.row_positions(0), dtype=np.int64)
  assert query is not None
  looked_up = _looked_up(layer, query, cache.next_positions - 1)
  valid = [layer.resident.positions, looked_up]
  positions = np.concatenate([np.ravel(x) for x in valid])
  return positions[positions >= 0]


@jax.jit
def _looked_up(
  layer: SparseLayer,
  query: Float[Array, "B N D"],
  positions: Int[Array, " B"],
) -> Int[Array, "B K F"]:
  """Positions of the stored tokens that a token of each row reads; else -1."""
  _, found = layer.retrieve(layer.index, query, positions)
  slots = found.visible_slots
  slots = slots.reshape(*slots.shape[:2], -1)
  stored = layer.stored.positions
  return jnp.where(named_slots(slots, stored.shape[-1]), stored, -1)


def _last_queries(
  model: Model, params: PyTree, full: kvjax.Cache, token: int
) -> _Queries:
  """Each layer's queries of the last token, which a full cache holds."""

  def attend(
    layer: int, state: Layer, seen: Activations
  ) -> tuple[Float[Array, "B N S D"], Float[Array, "B N D"]]:
    del layer
    output, _ = state.attend(seen)
    return output, seen.queries[:, :, 0]

  def queries(
    params: PyTree, cache: kvjax.Cache, tokens: Int[Array, "B S"]
  ) -> tuple[Float[Array, "B N D"], ...]:
    positions = cache.next_positions[:, None] - 1
    return hidden_states(
      model, params, tokens, positions, cache.layers, attend
    )[1]

  return jax.jit(queries)(params, full, np.array([[token]], np.int32))
