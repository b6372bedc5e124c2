"""Exact search: what every index approximates."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from kvjax.retrieval.base import (
  Found,
  Prompt,
  Reads,
  Retrieval,
  Store,
  attention_worth,
  best_slots,
)


@dataclasses.dataclass(frozen=True)
class Flat(Retrieval):
  """Reads the keys that the token attends to most, found by looking at all.

  The worth of a key is the maximum over the group's heads of
  softmax(q K^T / sqrt(D)) over the stored keys. The upper bound of `CTkvr`.
  """

  def index(self, prompt: Prompt, reads: Reads) -> None:
    """Nothing is prepared."""

  def retrieve(
    self,
    index: None,
    queries: Float[Array, "G D"],
    store: Store,
    reads: Reads,
  ) -> tuple[Found, PyTree[Array]]:
    """The best of all stored keys."""
    assert store.keys is not None
    keys = store.keys.astype(jnp.float32)
    keys = jnp.where(store.valid[:, None], keys, 0.0)
    worth = attention_worth(queries, keys, store.valid)
    return Found(best_slots(worth, store.valid, reads)[None]), None
