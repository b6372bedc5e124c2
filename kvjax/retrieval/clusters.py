"""Clusters of keys, of which whole ones are read."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.clustering import kmeans, nearest
from kvjax.options.bounds import check_least
from kvjax.retrieval.base import KeysRead, Prompt, Reads, Retrieval
from kvjax.struct import struct


@struct
class Clusters:
  """The stored keys of one KV head, cluster by cluster.

  Attributes:
    centroids: mean key of each cluster; zero where it has none.
    sizes: how many keys it has.
    slots: of the first cluster's keys, ascending, then of the second's and so
      on; then the slots that hold none.
  """

  centroids: Float[Array, "*B C D"]
  sizes: Int[Array, "*B C"]
  slots: Int[Array, "*B F"]

  def best(self, worth: Float[Array, "G C"], reads: Reads) -> Int[Array, "G M"]:
    """The keys of each head's best clusters, until there are enough.

    Of the first cluster that has too many the lower slots are read; of equal
    clusters the first is the better one. A cluster without a finite worth is
    read last, an empty one not at all.
    """
    most = min(reads.most, self.slots.shape[0])
    place = jnp.arange(most, dtype=jnp.int32)
    starts = jnp.cumsum(self.sizes) - self.sizes

    def listed(worth: Float[Array, " C"]) -> Int[Array, " M"]:
      # The best first: the last that is read may be read in part.
      order = jnp.argsort(-jnp.where(jnp.isfinite(worth), worth, -jnp.inf))
      sizes = self.sizes[order]
      ends = jnp.cumsum(sizes)
      # The first cluster in this order that ends behind the place; the last
      # one for places behind all of them.
      which = jnp.searchsorted(ends[:-1], place, side="right")
      inside = place - (ends - sizes)[which]
      slots = self.slots[starts[order][which] + inside]
      return jnp.where(place < jnp.minimum(reads.count, ends[-1]), slots, -1)

    return jax.vmap(listed)(worth)


@dataclasses.dataclass(frozen=True)
class Clustered(Retrieval):
  """Stores clusters of keys, made by K-means with a K-means++ start.

  Attributes:
    clusters: of a KV head; 0 for one per `cluster_tokens`.
    cluster_tokens: tokens of the prompt per cluster.
    iterations: of K-means, at most.
    seed: of its start, another one for every layer and KV head.
  """

  reads_keys: ClassVar[KeysRead] = "none"

  clusters: int = 0
  cluster_tokens: int = 80
  iterations: int = 20
  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, clusters=0, cluster_tokens=1, iterations=1)

  def clustered(self, prompt: Prompt, points: Float[Array, "F D"]) -> Clusters:
    """Clusters of the keys that may be looked up.

    Args:
      prompt: whose keys.
      points: what K-means sees of each key: the key itself, or its direction.
    """
    stored = prompt.stored
    slots = stored.shape[0]
    most, wanted = self.clusters, jnp.full((), self.clusters, jnp.int32)
    if not self.clusters:
      valid = prompt.head.valid
      most = valid.shape[0] // self.cluster_tokens
      wanted = jnp.sum(valid.astype(jnp.int32)) // self.cluster_tokens
    most = min(max(most, 1), slots)
    # A row's own number, not that of the padded prompt.
    keys_stored = jnp.sum(stored.astype(jnp.int32))
    wanted = jnp.clip(wanted, 1, jnp.maximum(keys_stored, 1))
    centers, exists = kmeans(
      points, stored, prompt.key(self.seed), most, self.iterations, wanted
    )
    cluster = jnp.where(stored, nearest(points, centers, exists), most)
    ones = jnp.ones(slots, jnp.int32)
    sizes = jax.ops.segment_sum(ones, cluster, most + 1)[:most]
    sums = jax.ops.segment_sum(prompt.stored_keys, cluster, most + 1)[:most]
    means = sums / jnp.maximum(sizes, 1).astype(jnp.float32)[:, None]
    return Clusters(
      means.astype(prompt.head.cached_keys.dtype),
      sizes,
      # What belongs together side by side; to list the slots of each cluster
      # for itself would look at all of them for every cluster.
      jnp.argsort(cluster).astype(jnp.int32),
    )
