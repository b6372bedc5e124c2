"""Retrieval of whole clusters of keys."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.clustering import kmeans, nearest
from kvjax.options.bounds import check_least
from kvjax.retrieval.base import KeyAccess, KeyBudget, Prompt, Retrieval
from kvjax.struct import struct


@struct
class Clusters:
  """The stored keys of one KV head, grouped into clusters.

  Attributes:
    centroids: mean key of each cluster; zero for an empty cluster.
    sizes: number of keys of each cluster.
    slots: slots of the first cluster's keys, ascending, then those of the
      second and so on, then the empty slots.
  """

  centroids: Float[Array, "*B C D"]
  sizes: Int[Array, "*B C"]
  slots: Int[Array, "*B F"]

  def select_best(
    self, scores: Float[Array, "G C"], budget: KeyBudget
  ) -> Int[Array, "G M"]:
    """Selects the keys of each head's best clusters until the budget is full.

    The cluster that overflows the budget contributes its lowest slots. Ties
    prefer the earlier cluster. Clusters whose score is not finite come last;
    empty clusters are never read.
    """
    max_keys = min(budget.max_keys, self.slots.shape[0])
    rank = jnp.arange(max_keys, dtype=jnp.int32)
    starts = jnp.cumsum(self.sizes) - self.sizes

    def select(scores: Float[Array, " C"]) -> Int[Array, " M"]:
      # Best first: only the last cluster that is read may be cut.
      order = jnp.argsort(-jnp.where(jnp.isfinite(scores), scores, -jnp.inf))
      sizes = self.sizes[order]
      ends = jnp.cumsum(sizes)
      # The first cluster in this order that ends after the rank; the last
      # cluster for ranks after all of them.
      which = jnp.searchsorted(ends[:-1], rank, side="right")
      inside = rank - (ends - sizes)[which]
      slots = self.slots[starts[order][which] + inside]
      return jnp.where(rank < jnp.minimum(budget.num_keys, ends[-1]), slots, -1)

    return jax.vmap(select)(scores)


@dataclasses.dataclass(frozen=True)
class ClusterRetrieval(Retrieval):
  """Base of methods that cluster keys by K-means with a K-means++ start.

  Attributes:
    clusters: clusters per KV head; 0 for one per `cluster_tokens`.
    cluster_tokens: tokens of the prompt per cluster.
    iterations: maximum number of iterations of K-means.
    seed: seed of the start, which differs between layers and KV heads.
  """

  key_access: ClassVar[KeyAccess] = "none"

  clusters: int = 0
  cluster_tokens: int = 80
  iterations: int = 20
  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, clusters=0, cluster_tokens=1, iterations=1)

  def cluster_keys(
    self, prompt: Prompt, points: Float[Array, "F D"]
  ) -> Clusters:
    """Clusters the keys that may be retrieved.

    Args:
      prompt: one KV head of the prompt.
      points: what K-means is run on: the keys themselves or their directions.
    """
    stored = prompt.stored
    slots = stored.shape[0]
    max_clusters = self.clusters
    num_clusters = jnp.full((), self.clusters, jnp.int32)
    if not self.clusters:
      valid = prompt.head.valid
      # Shapes follow the padded length, the number of clusters the row's own.
      max_clusters = valid.shape[0] // self.cluster_tokens
      num_clusters = jnp.sum(valid, dtype=jnp.int32) // self.cluster_tokens
    max_clusters = min(max(max_clusters, 1), slots)
    num_stored = jnp.sum(stored, dtype=jnp.int32)
    num_clusters = jnp.clip(num_clusters, 1, jnp.maximum(num_stored, 1))
    centers, exists = kmeans(
      points,
      stored,
      prompt.key(self.seed),
      max_clusters,
      self.iterations,
      num_clusters,
    )
    # An extra cluster for empty slots, which sorts them to the end.
    cluster = jnp.where(stored, nearest(points, centers, exists), max_clusters)

    def total(x: Shaped[Array, "F *A"]) -> Shaped[Array, "C *A"]:
      summed = jax.ops.segment_sum(x, cluster, max_clusters + 1)
      return summed[:max_clusters]

    sizes = total(jnp.ones(slots, jnp.int32))
    # The centers of K-means are directions; the centroid is the mean raw key.
    counts = jnp.maximum(sizes, 1).astype(jnp.float32)
    means = total(prompt.stored_keys) / counts[:, None]
    return Clusters(
      means.astype(prompt.head.cached_keys.dtype),
      sizes,
      # One sort groups the slots by cluster; listing the slots of each cluster
      # separately would scan all slots once per cluster.
      jnp.argsort(cluster).astype(jnp.int32),
    )
