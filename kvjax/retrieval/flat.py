"""Exact search, which every index approximates."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from kvjax.retrieval.base import KeyBudget, Prompt, Retrieval, Selection, Store
from kvjax.retrieval.weights import best_slots, max_attention


@dataclasses.dataclass(frozen=True)
class Flat(Retrieval):
  """Reads the keys that the token attends to most, by exhaustive search.

  The score of a key is the maximum over the group's heads of
  softmax(q K^T / sqrt(D)) over the stored keys. This is the upper bound of
  `CTkvr`.
  """

  def num_queries(self, length: int) -> int:
    """No queries: there is no index."""
    return 0

  def index(self, prompt: Prompt, budget: KeyBudget) -> None:
    """Builds no index: exact search needs the keys alone."""

  def retrieve(
    self,
    index: None,
    queries: Float[Array, "G D"],
    store: Store,
    budget: KeyBudget,
  ) -> tuple[Selection, PyTree[Array]]:
    """Selects the stored keys with the highest attention weights."""
    assert store.keys is not None
    keys = store.keys.astype(jnp.float32)
    keys = jnp.where(store.valid[:, None], keys, 0.0)
    scores = max_attention(queries, keys, store.valid)
    return Selection(best_slots(scores, store.valid, budget)[None]), None
