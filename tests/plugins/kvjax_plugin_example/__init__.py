"""Methods of another package: to evict, to retrieve and around others."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

import kvjax
from kvjax.methods import window_mass
from kvjax.retrieval import best_slots


@dataclasses.dataclass(frozen=True)
class LastVotes(kvjax.methods.ScoringMethod):
  """Keeps the last tokens and those that any of their queries attends to.

  Attributes:
    window: number of last tokens.
  """

  window: int = 8

  @property
  def traits(self) -> kvjax.methods.Traits:
    """It reads the last queries and keeps their tokens."""
    return kvjax.methods.Traits(window=self.window, protects=self.window)

  def scores(
    self,
    layer: Int[Array, ""],
    cache: kvjax.LayerCache,
    activations: kvjax.Activations,
  ) -> Float[Array, "B K T"]:
    """Computes the maximum attention over the query heads of the group."""
    del layer
    return jnp.max(window_mass(cache, activations, self.window), axis=2)

  def protected(
    self, cache: kvjax.LayerCache, counts: Int[Array, "B #K"]
  ) -> Bool[Array, "B K T"]:
    """The last tokens."""
    del counts
    last = jnp.max(cache.positions, axis=-1, keepdims=True)
    return cache.valid & (cache.positions > last - self.window)


@dataclasses.dataclass(frozen=True)
class Flipped(kvjax.methods.Around):
  """Keeps the tokens with the lowest scores of another method."""

  @property
  def traits(self) -> kvjax.methods.Traits:
    """Those of the method, but its scores are no weights any more."""
    return dataclasses.replace(self.over.traits, weighs=False)

  def evaluate(
    self,
    layer: Int[Array, ""],
    cache: kvjax.LayerCache,
    activations: kvjax.Activations,
  ) -> PyTree[Array]:
    """Computes the scores with the other sign."""
    scores = self.over.evaluate(layer, cache, activations)
    return jax.tree.map(jnp.negative, scores)


@dataclasses.dataclass(frozen=True)
class MeanQuery(kvjax.retrieval.Retrieval):
  """Reads the keys nearest to the mean of a group's queries."""

  def index(
    self, prompt: kvjax.retrieval.Prompt, budget: kvjax.retrieval.KeyBudget
  ) -> None:
    """Builds no index."""

  def retrieve(
    self,
    index: None,
    queries: Float[Array, "G D"],
    store: kvjax.retrieval.Store,
    budget: kvjax.retrieval.KeyBudget,
  ) -> tuple[kvjax.retrieval.Selection, PyTree[Array]]:
    """Selects the keys with the largest products."""
    keys = store.keys.astype(jnp.float32)
    keys = jnp.where(store.valid[:, None], keys, 0.0)
    slots = best_slots(keys @ jnp.mean(queries, axis=0), store.valid, budget)
    return kvjax.retrieval.Selection(slots[None]), None


def register() -> None:
  """Registers the others under their names, with a preset."""
  kvjax.register_prefix("flipped", Flipped, summary="what would be dropped")
  kvjax.register(
    "mean_query",
    MeanQuery,
    presets={"near": MeanQuery(local=16)},
    summary="keys nearest to the mean query",
  )
