"""Squeezed Attention: clusters of keys, ranked by their estimated attention."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.clustering import unit
from kvjax.options.bounds import check_least
from kvjax.retrieval.base import Found, Prompt, Reads, Store
from kvjax.retrieval.clusters import Clustered, Clusters
from kvjax.struct import struct


@struct
class Squeezed:
  """The clusters of one KV head and the last queries that asked for them.

  Attributes:
    clusters: of the stored keys.
    queries: a ring of the last W; that of token i of the row is in place i % W.
    tokens: that the row has had so far.
  """

  clusters: Clusters
  queries: Float[Array, "*B G W D"]
  tokens: Int[Array, "*B"]

  def after(
    self, queries: Float[Array, "G D"], real: Bool[Array, ""]
  ) -> "Squeezed":
    """The same with a token's queries in the place of the oldest.

    Args:
      queries: of the heads that read this KV head.
      real: false for padding, which changes nothing.
    """
    place = self.tokens % self.queries.shape[1]
    ring = self.queries.at[:, place].set(queries.astype(self.queries.dtype))
    return dataclasses.replace(
      self,
      queries=jnp.where(real, ring, self.queries),
      tokens=self.tokens + real.astype(jnp.int32),
    )


@dataclasses.dataclass(frozen=True)
class SqueezedAttention(Clustered):
  """Reads whole clusters of keys, by the attention that they would receive.

  K-means gathers the directions of the keys. A cluster c of N_c keys has the
  mean of its raw keys as its centroid, and each of its keys would receive

    est_c = exp(q c / sqrt(D)) / sum_j N_j exp(q c_j / sqrt(D)).

  Every query head reads the clusters of the highest est, on average over its
  last W queries, until the budget is full; of the one that overflows it reads
  the first tokens.

  The paper reads every cluster whose est exceeds a threshold. It is set once,
  on the prompt's last 100 queries, so that all heads of all layers together
  read a wanted share; what one of them reads has no bound then, and no static
  shape. So each has a budget here. The search by two levels of clusters, which
  saves time, is left out.

  Source: Hooper et al., arXiv 2411.09688. The tokens that are resident are
  those that the authors' code does not cluster.

  Attributes:
    cluster_tokens: 20 make as many clusters as 5 % of the tokens.
    window: W; 1 asks with the present query alone.
  """

  sinks: int = 0
  local: int = 100
  cluster_tokens: int = 20
  iterations: int = 300
  window: int = 100

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, window=1)

  def index(self, prompt: Prompt, reads: Reads) -> Squeezed:
    """The clusters, and the prompt's last queries."""
    head = prompt.head
    tokens = jnp.sum((head.query_positions >= 0).astype(jnp.int32))
    place = jnp.arange(self.window, dtype=jnp.int32)
    # The last token whose number leaves this rest; there may be none.
    number = tokens - 1 - (tokens - 1 - place) % self.window
    queries = head.queries[:, jnp.maximum(number, 0)]
    queries = jnp.where((number >= 0)[None, :, None], queries, 0.0)
    clusters = self.clustered(prompt, unit(prompt.stored_keys))
    return Squeezed(clusters, queries, tokens)

  def retrieve(
    self,
    index: Squeezed,
    queries: Float[Array, "G D"],
    store: Store,
    reads: Reads,
  ) -> tuple[Found, Float[Array, "G D"]]:
    """The keys of the best clusters; the news are the queries."""
    now = index.after(queries, jnp.ones((), bool))
    return Found(now.clusters.best(_log_shares(now), reads)), queries

  def updated(
    self,
    index: Squeezed,
    news: Float[Array, "G D"],
    real: Bool[Array, ""],
  ) -> Squeezed:
    """The queries in the ring."""
    return index.after(news, real)


def _log_shares(index: Squeezed) -> Float[Array, "G C"]:
  """Logarithm of est, summed over the queries of the ring."""
  queries = index.queries.astype(jnp.float32)
  centroids = index.clusters.centroids.astype(jnp.float32)
  logits = jnp.einsum("gwd,cd->gwc", queries, centroids)
  logits = logits * queries.shape[-1] ** -0.5
  sizes = jnp.log(index.clusters.sizes.astype(jnp.float32))
  total = jax.nn.logsumexp(logits + sizes[None, None], axis=-1, keepdims=True)
  asked = jnp.arange(queries.shape[1]) < index.tokens
  return jax.nn.logsumexp(logits - total, axis=1, where=asked[None, :, None])
