"""Squeezed Attention: clusters of keys, ranked by their estimated attention."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.clustering import unit
from kvjax.options.bounds import check_least
from kvjax.retrieval.base import Entry, KeyBudget, Prompt, Selection, Store
from kvjax.retrieval.clusters import ClusterRetrieval, Clusters
from kvjax.struct import replace, struct


@struct
class Squeezed:
  """The clusters and the last queries of one KV head.

  Attributes:
    clusters: clusters of the stored keys.
    queries: ring of the last W queries; token i of the row is in place i % W.
    tokens: number of tokens of the row so far.
  """

  clusters: Clusters
  queries: Float[Array, "*B G W D"]
  tokens: Int[Array, "*B"]

  def append_queries(self, queries: Float[Array, "G D"]) -> "Squeezed":
    """Replaces the oldest queries by those of a token, one per query head."""
    place = self.tokens % self.queries.shape[1]
    ring = self.queries.at[:, place].set(queries.astype(self.queries.dtype))
    return replace(self, queries=ring, tokens=self.tokens + 1)


@dataclasses.dataclass(frozen=True)
class SqueezedAttention(ClusterRetrieval):
  """Reads whole clusters of keys by their estimated attention.

  K-means clusters the directions of the keys. The centroid c of a cluster of
  N_c keys is the mean of its raw keys, and the estimated attention of a key is

    est_c = exp(q c / sqrt(D)) / sum_j N_j exp(q c_j / sqrt(D)).

  Every query head reads the clusters with the highest est, averaged over its
  last W queries, until the budget is full. It reads only the first tokens of
  the cluster that overflows the budget.

  The paper reads every cluster whose est exceeds a threshold. The threshold is
  set once, on the prompt's last 100 queries, such that all heads of all layers
  together read a given share. The number of keys of one head then has no bound
  and no static shape, so every head has a budget here instead. The hierarchical
  search over two levels of clusters, which saves time, is not implemented.

  Source: Hooper et al., arXiv 2411.09688. The resident tokens are those that
  the authors' code does not cluster.

  Attributes:
    cluster_tokens: 20 means one cluster per 20 tokens, or 5 %.
    window: W; 1 uses the current query alone.
  """

  sinks: int = 0
  local: int = 100
  cluster_tokens: int = 20
  iterations: int = 300
  window: int = 100

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, window=1)

  def num_queries(self, length: int) -> int:
    """As many as the ring has places."""
    return self.window

  def index(self, prompt: Prompt, budget: KeyBudget) -> Squeezed:
    """Clusters the keys and stores the prompt's last queries."""
    head = prompt.head
    tokens = jnp.max(head.query_positions) + 1
    first = tokens - jnp.sum(head.query_positions >= 0, dtype=jnp.int32)
    place = jnp.arange(self.window, dtype=jnp.int32)
    # The last token with this place in the ring; negative if there is none.
    number = tokens - 1 - (tokens - 1 - place) % self.window
    queries = head.queries[:, jnp.maximum(number - first, 0)]
    queries = jnp.where((number >= 0)[None, :, None], queries, 0.0)
    clusters = self.cluster_keys(prompt, unit(prompt.stored_keys))
    return Squeezed(clusters, queries, tokens)

  def retrieve(
    self,
    index: Squeezed,
    queries: Float[Array, "G D"],
    store: Store,
    budget: KeyBudget,
  ) -> tuple[Selection, Float[Array, "G D"]]:
    """Selects the keys of the best clusters; the update is the queries."""
    # The current query counts already; `update_index` stores it for later ones.
    current = index.append_queries(queries)
    return Selection(
      current.clusters.select_best(_log_shares(current), budget)
    ), queries

  def update_index(
    self, index: Squeezed, update: Float[Array, "G D"], real: Bool[Array, ""]
  ) -> PyTree[Array | Entry | None]:
    """Appends the queries to the ring."""
    window = index.queries.shape[1]
    # Padding goes beyond the end, where nothing is written.
    place = jnp.where(real, index.tokens % window, window)
    return replace(
      index,
      clusters=None,
      queries=Entry(place, update, axis=1),
      tokens=index.tokens + real.astype(jnp.int32),
    )


def _log_shares(index: Squeezed) -> Float[Array, "G C"]:
  """Logarithm of est, summed over the queries of the ring."""
  queries = index.queries.astype(jnp.float32)
  centroids = index.clusters.centroids.astype(jnp.float32)
  logits = jnp.einsum("gwd,cd->gwc", queries, centroids)
  logits = logits * queries.shape[-1] ** -0.5
  sizes = jnp.log(index.clusters.sizes.astype(jnp.float32))
  total = jax.nn.logsumexp(logits + sizes[None, None], axis=-1, keepdims=True)
  # Places fill up in order. A sum ranks like the mean over these queries.
  filled = jnp.arange(queries.shape[1], dtype=jnp.int32) < index.tokens
  return jax.nn.logsumexp(logits - total, axis=1, where=filled[None, :, None])
