"""ProtoKV: clusters around prototypes are kept or dropped as a whole."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.cache import LayerCache
from kvjax.errors import InputError
from kvjax.methods import prototypes as proto
from kvjax.methods.base import (
  Allowance,
  Head,
  Method,
  heads_of,
  window_attention,
  window_queries,
)
from kvjax.selection import age, packed
from kvjax.struct import struct

Clusters = Literal["prototypes", "lsh", "kmeans", "none"]
Score = Literal["qk_sum", "qk_mean", "attn_sum", "attn_mean"]
Cut = Literal["score", "position", "skip", "none"]
Sign = Literal["deviation", "literal"]


@struct
class Ranking:
  """Prefix tokens in the order in which they are kept.

  Attributes:
    place: each token's place in that order; T for tokens outside the prefix.
    cluster: the place of each token's cluster among the clusters.
    sizes: tokens of each cluster, best cluster first.
  """

  place: Int[Array, "*B T"]
  cluster: Int[Array, "*B T"]
  sizes: Int[Array, "*B P"]


@dataclasses.dataclass(frozen=True)
class ProtoKV(Method):
  """Keeps whole clusters of keys, best first, and the observation window.

  The keys that resemble their neighbours least are hashed to a few anchor
  prototypes, the others are cut into contiguous chunks, one prototype each.
  Every token of the prefix joins its nearest prototype, and a cluster is worth
  what the window's queries give its members. The first cluster that does not
  fit is cut by its members' own worth.

  Source: ProtoKV, ICLR 2026 (OpenReview kXhPkDaFbJ).

  Attributes:
    window: W, the last tokens, which always stay.
    neighbours: kappa, the reach of the neighbourhood.
    include_self: a token is its own neighbour.
    sign: "literal" takes the tokens most like their neighbours as anchors.
    anchors: p, tokens hashed to anchor prototypes; 0 is Chunk-Clustering.
    bits: r; there are 2^r anchor prototypes.
    hash: random "fourier" features or a "hyperplane" per bit.
    sigma: bandwidth of the features.
    prototypes: all prototypes together.
    split: how chunks are cut.
    clusters: "lsh" hashes every token, "kmeans" replaces prototypes by K-means
      centres; "none" is SATKV: single tokens by deviation.
    iterations: of K-means.
    score: raw inner products or attention weights, summed over a cluster's
      members or averaged.
    cut: what becomes of the first cluster that does not fit: its best members
      by "score", its first by "position", "skip" it and try the next, or
      "none": stop there.
    seed: of hashes and K-means, one per layer and KV head.
  """

  window: int = 8
  neighbours: int = 5
  include_self: bool = True
  sign: Sign = "deviation"
  anchors: int = 32
  bits: int = 2
  hash: proto.Hash = "fourier"
  sigma: proto.Sigma = "median"
  prototypes: int = 500
  split: proto.Split = "balanced"
  clusters: Clusters = "prototypes"
  iterations: int = 10
  score: Score = "qk_sum"
  cut: Cut = "score"
  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    for name, least in (
      ("window", 1),
      ("neighbours", 1),
      ("anchors", 0),
      ("bits", 1),
      ("prototypes", 2),
      ("iterations", 1),
    ):
      if getattr(self, name) < least:
        raise InputError(
          f"{name} must be {least} or more; {getattr(self, name)} is not."
        )
    if self._anchor_prototypes >= self.prototypes and (
      self.clusters == "prototypes"
    ):
      raise InputError(
        f"{self.bits} bits make {self._anchor_prototypes} anchor prototypes, "
        f"which leave none of {self.prototypes} for the other tokens."
      )

  def evaluate(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> Ranking:
    """The order of every head's prefix tokens."""
    heads = heads_of(cache, seen)
    key = jax.random.fold_in(jax.random.key(self.seed), layer)
    index = jnp.arange(heads.positions.shape[1])
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, index)
    per_head = jax.vmap(self._rank_head)
    return jax.vmap(per_head, in_axes=(0, None))(heads, keys)

  def select(
    self, found: Ranking, cache: LayerCache, allowance: Allowance
  ) -> Int[Array, "B K M"]:
    """Whole clusters while they fit, the cut one, and the window."""
    held = cache.positions >= 0
    newest = jnp.minimum(allowance.counts, self.window)
    window = held & (age(held) <= newest[:, None, None])
    room = jnp.maximum(allowance.counts - self.window, 0)
    prefix = held & (age(held) > self.window)
    per_head = jax.vmap(self._fitting, in_axes=(0, None))
    kept = jax.vmap(per_head)(found, room)
    return packed(window | (prefix & kept), allowance.capacity)

  def _fitting(self, found: Ranking, room: Int[Array, ""]) -> Bool[Array, " T"]:
    if self.cut in ("score", "position"):
      return found.place < room
    if self.cut == "none":
      return jnp.cumsum(found.sizes)[found.cluster] <= room

    def visit(
      left: Int[Array, ""], size: Int[Array, ""]
    ) -> tuple[Int[Array, ""], Bool[Array, ""]]:
      fits = size <= left
      return left - jnp.where(fits, size, 0), fits

    _, fits = jax.lax.scan(visit, room, found.sizes)
    return fits[found.cluster]

  def _rank_head(self, head: Head, rng: Array) -> Ranking:
    keys = head.keys
    prefix = head.held & (age(head.held) > self.window)
    dev = proto.deviation(keys, prefix, self.neighbours, self.include_self)
    dev = dev if self.sign == "deviation" else -dev
    if self.clusters == "none":
      alone = jnp.zeros_like(head.positions)
      return _ranking(alone, jnp.zeros(1), prefix, dev)
    centers, exists = self._centers(keys, prefix, dev, rng)
    cluster = proto.nearest(keys, centers, exists)
    own = self._own_scores(head)
    target = jnp.where(prefix, cluster, len(centers))
    worth = jax.ops.segment_sum(own, target, len(centers) + 1)[:-1]
    if self.score.endswith("mean"):
      ones = jnp.ones(own.shape, jnp.float32)
      sizes = jax.ops.segment_sum(ones, target, len(centers) + 1)[:-1]
      worth = worth / jnp.maximum(sizes, 1.0)
    index = jnp.arange(len(own), dtype=jnp.float32)
    inside = -index if self.cut == "position" else own
    return _ranking(cluster, worth, prefix, inside)

  def _centers(
    self,
    keys: Float[Array, "T D"],
    prefix: Bool[Array, " T"],
    dev: Float[Array, " T"],
    rng: Array,
  ) -> tuple[Float[Array, "P D"], Bool[Array, " P"]]:
    if self.clusters == "kmeans":
      return proto.kmeans(keys, prefix, rng, self.prototypes, self.iterations)
    masked = jnp.where(prefix, dev, -jnp.inf)
    best, slots = jax.lax.top_k(masked, min(max(self.anchors, 1), len(keys)))
    valid = jnp.isfinite(best)
    hashed = proto.buckets(
      keys, slots, valid, rng, self.bits, self.hash, self.sigma
    )
    if self.clusters == "lsh":
      groups = jnp.where(prefix, hashed, -1)
      return proto.prototypes(keys, groups, 2**self.bits)
    anchor = jnp.zeros(prefix.shape, bool)
    if self.anchors:
      anchor = anchor.at[slots].set(valid)
    rest = prefix & ~anchor
    plain = self.prototypes - self._anchor_prototypes
    size = jnp.sum(rest.astype(jnp.int32))
    chunk = proto.chunks(rest, jnp.minimum(plain, size), self.split)
    groups = jnp.where(anchor, plain + hashed, chunk)
    return proto.prototypes(keys, groups, self.prototypes)

  def _own_scores(self, head: Head) -> Float[Array, " T"]:
    """What the window's queries of the whole group give each token."""
    if self.score.startswith("attn"):
      return jnp.sum(window_attention(head, self.window), axis=(0, 1))
    queries, _ = window_queries(head, self.window)
    return head.keys @ jnp.sum(queries, axis=(0, 1))

  @property
  def _anchor_prototypes(self) -> int:
    return 2**self.bits if self.anchors else 0


def _ranking(
  cluster: Int[Array, " T"],
  worth: Float[Array, " P"],
  prefix: Bool[Array, " T"],
  inside: Float[Array, " T"],
) -> Ranking:
  """Tokens by their cluster's worth, then by `inside`, then by position."""
  index = jnp.arange(len(prefix), dtype=jnp.int32)
  best_first = jnp.argsort(-worth, stable=True)
  rank = (
    jnp.zeros_like(best_first)
    .at[best_first]
    .set(jnp.arange(len(worth), dtype=best_first.dtype))
  )
  mine = jnp.where(prefix, rank[cluster].astype(jnp.int32), len(worth))
  order = jax.lax.sort((mine, -inside, index), num_keys=3)[2]
  place = jnp.zeros_like(index).at[order].set(index)
  ones = prefix.astype(jnp.int32)
  sizes = jax.ops.segment_sum(ones, mine, len(worth) + 1)[:-1]
  return Ranking(
    jnp.where(prefix, place, len(prefix)),
    jnp.minimum(mine, len(worth) - 1),
    sizes,
  )
