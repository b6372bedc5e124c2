"""ProtoKV: clusters around prototypes are kept or evicted as a whole."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from kvjax import clustering
from kvjax.activations import Activations
from kvjax.cache.heads import heads_of
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.heads import Head, by_kv_head
from kvjax.kernels.attention import AttentionOptions
from kvjax.kernels.select import largest, mask_to_slots, slots_to_mask
from kvjax.methods.base import LayerBudget, Method
from kvjax.methods.last_queries import window_mass, window_queries
from kvjax.methods.ranking import (
  ClusterRanking,
  Cut,
  rank_clusters,
  score_centers,
  score_clusters,
  select_fitting,
  without,
)
from kvjax.methods.snapkv import SnapKV
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least, check_used
from kvjax.selection import last_tokens, newest

Clusters = Literal["prototypes", "lsh", "kmeans", "none"]
Score = Literal["qk_sum", "qk_mean", "attn_sum", "attn_mean", "attn_center"]
Sign = Literal["deviation", "literal"]

# Options without effect, by `clusters`, but for the maxima `prototypes` and
# `iterations`.
_UNUSED: Mapping[Clusters, tuple[str, ...]] = {
  "prototypes": (),
  "lsh": ("split",),
  "kmeans": (
    *("neighbors", "include_self", "sign"),
    *("anchors", "bits", "hash", "sigma", "split"),
  ),
  "none": ("anchors", "bits", "hash", "sigma", "split", "score"),
}


@dataclasses.dataclass(frozen=True)
class ProtoKV(Method):
  """Keeps whole clusters of keys, best first, and the observation window.

  The keys least similar to their neighbors are hashed to a few anchor
  prototypes. The others are split into contiguous chunks, with one prototype
  each. Every token of the prefix joins its nearest prototype. A cluster's score
  combines the scores that the window's queries give its members. The first
  cluster that does not fit is cut by the scores of its members.

  Source: ProtoKV, ICLR 2026 (OpenReview kXhPkDaFbJ), of which we have read only
  a note, the public reviews and the authors' notebooks; ours are the sign of
  the similarity, sigma, the rule of the bits, the cut, W and the sum over the
  group. The note says 500 prototypes for any prompt and raw inner products,
  which is the preset `paper`. At 1,024 tokens that leaves no clusters to speak
  of, and raw products are mostly negative, so that large clusters come last.

  Attributes:
    window: W, number of last tokens, which are always kept.
    sinks: number of first tokens that are kept, after the window.
    neighbors: kappa, radius of the neighborhood.
    include_self: whether a token is its own neighbor.
    sign: "literal" takes the tokens most similar to their neighbors as anchors.
    anchors: p, tokens hashed to anchor prototypes; 0 is Chunk-Clustering.
    bits: r; there are 2^r anchor prototypes.
    hash: random "fourier" features or a "hyperplane" per bit.
    sigma: bandwidth of the features.
    prototypes: maximum number of prototypes, anchors' included.
    tokens_per_prototype: shorter prompts have one prototype for so many tokens.
    split: how chunks are cut.
    clusters: "lsh" hashes every token, "kmeans" replaces prototypes by K-means
      centers; "none" is SATKV: single tokens by deviation.
    iterations: maximum number of iterations of K-means.
    score: raw inner products or attention weights, summed or averaged over a
      cluster's members; "attn_center" is the attention that every member would
      get if its key were the mean of the members' keys.
    cut: how the first cluster that does not fit is treated: keep its best
      members by "score", keep its first by "position", "skip" it and try the
      next, or "none" to stop there.
    seed: seed of hashes and K-means, which differ between layers and KV heads.
  """

  window: int = 8
  sinks: int = 0
  neighbors: int = 5
  include_self: bool = True
  sign: Sign = "deviation"
  anchors: int = 32
  bits: int = 2
  hash: clustering.Hash = "fourier"
  sigma: clustering.Sigma = "median"
  prototypes: int = 500
  tokens_per_prototype: int = 16
  split: clustering.Split = "balanced"
  clusters: Clusters = "prototypes"
  iterations: int = 10
  score: Score = "attn_sum"
  cut: Cut = "score"
  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(
      self,
      window=1,
      sinks=0,
      neighbors=1,
      anchors=0,
      bits=0,
      prototypes=2,
      tokens_per_prototype=1,
      iterations=1,
    )
    check_used(self, "clusters", *_UNUSED[self.clusters])
    if self._anchor_prototypes >= self.prototypes and (
      self.clusters == "prototypes"
    ):
      raise InputError(
        f"{self.bits} bits make {self._anchor_prototypes} anchor prototypes, "
        f"which leave none of {self.prototypes} for the other tokens."
      )

  @property
  def traits(self) -> Traits:
    """It reads the last W queries and keeps their tokens."""
    return Traits(
      whole_prompts_only="its clusters are those of a whole prompt",
      coarse="it keeps whole clusters" if self.cut in ("skip", "none") else "",
      window=self.window,
      queries=self.window,
      protects=self.window,
      stochastic=True,
    )

  @property
  def votes(self) -> SnapKV:
    """SnapKV with the same window."""
    return SnapKV(window=self.window, kernel=7, pooling="max")

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> ClusterRanking:
    """Ranks the prefix tokens of every head."""
    heads = heads_of(cache, activations)
    key = jax.random.fold_in(jax.random.key(self.seed), layer)
    index = jnp.arange(heads.positions.shape[1], dtype=jnp.int32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, index)
    token_scores = self._score_tokens(heads, cache, activations)
    queries, sinks = self._queries(cache, activations), activations.sinks
    if sinks is not None:
      of_heads = sinks.astype(jnp.float32).reshape(len(keys), -1)
      # A prompt that is shorter than the window has fewer queries.
      each = queries.shape[2] // of_heads.shape[1]
      sinks = jnp.repeat(of_heads, each, axis=1)
    rank = functools.partial(self._rank_head, activations.attention)
    # Rows share the random keys: none may depend on its place in the batch.
    return jax.vmap(jax.vmap(rank), in_axes=(0, 0, 0, None, None))(
      heads, token_scores, queries, sinks, keys
    )

  def select(
    self, scores: ClusterRanking, cache: LayerCache, budget: LayerBudget
  ) -> Int[Array, "B K M"]:
    """Selects clusters while they fit, the cut one, and the window."""
    valid = cache.valid
    spare = jnp.maximum(budget.per_head - self.window, 0)
    # Sinks take only what the window leaves.
    first = cache.positions < jnp.minimum(self.sinks, spare)[..., None]
    must_keep = budget.must_keep(cache) | (valid & first)
    window = newest(valid, must_keep, budget.per_head, self.window)
    must_keep &= ~window
    # `newest` shortens the window only where nothing else fits: W counts.
    taken = self.window + jnp.sum(must_keep, axis=-1, dtype=jnp.int32)
    remaining = jnp.maximum(budget.per_head - taken, 0)
    prefix = valid & ~last_tokens(valid, self.window)
    select_head = functools.partial(select_fitting, cut=self.cut)
    # A cluster costs only what it adds to the tokens that are kept anyway.
    others = jax.vmap(jax.vmap(without))(scores, prefix & must_keep)
    kept = jax.vmap(jax.vmap(select_head))(others, remaining)
    return mask_to_slots(window | must_keep | (prefix & kept), budget.capacity)

  def token_scores(
    self, scores: ClusterRanking, cache: LayerCache
  ) -> Float[Array, "B K T"] | None:
    """Returns the scores of tokens in their clusters, unless by position."""
    del cache
    return None if self.cut == "position" else scores.inside

  def _rank_head(
    self,
    options: AttentionOptions,
    head: Head,
    token_scores: Float[Array, " T"],
    queries: Float[Array, "Q D"],
    sinks: Float[Array, " Q"] | None,
    rng: PRNGKeyArray,
  ) -> ClusterRanking:
    # Arbitrary in empty slots, which are masked where keys are read: masking
    # all of them here would copy them.
    keys = head.cached_keys.astype(jnp.float32)
    prefix = head.valid & ~last_tokens(head.valid, self.window)
    dev = clustering.deviation(keys, prefix, self.neighbors, self.include_self)
    # `deviation` returns -Theta; the note, read literally, ranks by Theta.
    dev = dev if self.sign == "deviation" else -dev
    if self.clusters == "none":
      # One cluster of the whole prefix: its cut then ranks single tokens.
      alone = jnp.zeros_like(head.positions)
      return rank_clusters(alone, jnp.zeros(1, jnp.float32), prefix, dev)
    centers, exists = self._centers(keys, prefix, dev, rng)
    cluster = clustering.nearest(keys, centers, exists)
    if self.score == "attn_center":
      scores = score_centers(
        queries, keys, cluster, prefix, len(centers), options, sinks
      )
    else:
      mean = self.score.endswith("mean")
      scores = score_clusters(token_scores, cluster, prefix, len(centers), mean)
    index = jnp.arange(len(token_scores), dtype=jnp.float32)
    inside = -index if self.cut == "position" else token_scores
    return rank_clusters(cluster, scores, prefix, inside)

  def _centers(
    self,
    keys: Float[Array, "T D"],
    prefix: Bool[Array, " T"],
    dev: Float[Array, " T"],
    rng: PRNGKeyArray,
  ) -> tuple[Float[Array, "P D"], Bool[Array, " P"]]:
    if self.clusters == "kmeans":
      # Shapes have the maximum; a shorter row uses the first `wanted` centers.
      wanted = self._limit(prefix)
      return clustering.kmeans(
        keys, prefix, rng, self.prototypes, self.iterations, wanted
      )
    # Not empty even without anchors, as shapes must not be; `lsh` takes the
    # bandwidth of its features from these keys.
    most = min(max(self.anchors, 1), len(keys))
    masked = jnp.where(prefix, dev, -jnp.inf)
    slots = largest(masked, jnp.asarray(most, jnp.int32), most)
    hashed = clustering.buckets(
      keys, slots, slots >= 0, rng, self.bits, self.hash, self.sigma
    )
    if self.clusters == "lsh":
      groups = jnp.where(prefix, hashed, -1)
      return clustering.prototypes(keys, groups, 2**self.bits)
    anchor = jnp.zeros(prefix.shape, bool)
    if self.anchors:
      anchor = slots_to_mask(slots, len(keys))
    rest = prefix & ~anchor
    # Shapes need no more prototypes than the longest row has.
    plain = min(
      self.prototypes - self._anchor_prototypes,
      -(-len(keys) // self.tokens_per_prototype),
    )
    num_chunks = jnp.minimum(plain, self._limit(rest))
    chunk = clustering.chunks(rest, num_chunks, self.split)
    # Chunk prototypes come first: ties go to the lower prototype.
    groups = jnp.where(anchor, plain + hashed, chunk)
    return clustering.prototypes(keys, groups, plain + self._anchor_prototypes)

  def _score_tokens(
    self, heads: Head, cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Scores each token by the window's queries of the whole group."""
    if self.score.startswith("attn"):
      return jnp.sum(window_mass(cache, activations, self.window), axis=2)
    # Products are linear, so the sum of all queries scores a key at once.
    total = jnp.sum(self._queries(cache, activations), axis=2)
    return jnp.einsum("bktd,bkd->bkt", heads.keys, total)

  def _queries(
    self, cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K Q D"]:
    """The window's queries of all heads of a group; zero for padding."""
    queries, places = window_queries(cache, activations, self.window)
    real = (places >= 0)[:, None, :, None]
    queries = jnp.where(real, queries.astype(jnp.float32), 0.0)
    queries = by_kv_head(queries, cache.keys.shape[1])
    return queries.reshape(*queries.shape[:2], -1, queries.shape[-1])

  def _limit(self, tokens: Bool[Array, " T"]) -> Int[Array, ""]:
    """Number of prototypes that so many tokens have."""
    count = jnp.sum(tokens, dtype=jnp.int32)
    return -(-count // self.tokens_per_prototype)

  @property
  def _anchor_prototypes(self) -> int:
    return 2**self.bits if self.anchors else 0
