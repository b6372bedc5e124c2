"""Ranking of clusters of tokens, and selection of those that fit."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.attention import AttentionOptions
from kvjax.kernels.select import among_largest
from kvjax.selection import finite
from kvjax.struct import replace, struct

Cut = Literal["score", "position", "skip", "none"]


@struct
class ClusterRanking:
  """The order in which clusters, and the tokens of a cluster, are kept.

  Attributes:
    inside: score of each token in its cluster; -inf outside the prefix.
    cluster: rank of each token's cluster.
    sizes: tokens of each cluster, best cluster first.
  """

  inside: Float[Array, "*B T"]
  cluster: Int[Array, "*B T"]
  sizes: Int[Array, "*B P"]


def score_clusters(
  token_scores: Float[Array, " T"],
  cluster: Int[Array, " T"],
  prefix: Bool[Array, " T"],
  count: int,
  mean: bool,
) -> Float[Array, " P"]:
  """Sums or averages the scores of each cluster's members; 0 if it is empty.

  Args:
    token_scores: score of every token.
    cluster: cluster of every token.
    prefix: the tokens that count.
    count: P, number of clusters.
    mean: divide by the number of members.
  """
  target = jnp.where(prefix, cluster, count)
  scores = jax.ops.segment_sum(token_scores, target, count + 1)[:-1]
  if not mean:
    return scores
  ones = jnp.ones(token_scores.shape, jnp.float32)
  sizes = jax.ops.segment_sum(ones, target, count + 1)[:-1]
  return scores / jnp.maximum(sizes, 1.0)


def score_centers(
  queries: Float[Array, "Q D"],
  keys: Float[Array, "T D"],
  cluster: Int[Array, " T"],
  prefix: Bool[Array, " T"],
  count: int,
  options: AttentionOptions,
  sinks: Float[Array, " Q"] | None,
) -> Float[Array, " P"]:
  """Estimates the attention of a key of each cluster by the cluster's mean key.

  It is the sum over the queries of exp(q c / sqrt(D)) / sum_j N_j exp(q c_j /
  sqrt(D)), where c is the mean of a cluster's N_c keys. Source: Squeezed
  Attention, arXiv 2411.09688.

  Args:
    queries: float32 queries; those that are zero do not count.
    keys: float32 keys.
    cluster: cluster of every token.
    prefix: the tokens that count.
    count: P, number of clusters; empty ones get 0.
    options: scale and softcap of the layer.
    sinks: a logit for each query that joins its denominator.
  """
  # Tokens outside the prefix go to an extra segment, which is cut off.
  target = jnp.where(prefix, cluster, count)
  sums = jax.ops.segment_sum(keys, target, count + 1)[:-1]
  ones = jnp.ones(cluster.shape, jnp.float32)
  sizes = jax.ops.segment_sum(ones, target, count + 1)[:-1]
  means = sums / jnp.maximum(sizes, 1.0)[:, None]
  logits = queries @ means.T * options.scale_of(queries.shape[-1])
  logits = options.cap(logits)
  # Weighted by N_j, so that empty clusters add nothing.
  total = jax.nn.logsumexp(logits, axis=-1, b=sizes[None], keepdims=True)
  if sinks is not None:
    total = jnp.logaddexp(total, sinks[:, None])
  real = jnp.any(queries != 0, axis=-1, keepdims=True)
  return jnp.sum(
    jnp.exp(logits - total), axis=0, where=real & (sizes > 0)[None]
  )


def rank_clusters(
  cluster: Int[Array, " T"],
  scores: Float[Array, " P"],
  prefix: Bool[Array, " T"],
  inside: Float[Array, " T"],
) -> ClusterRanking:
  """Ranks clusters by their scores, and tokens by `inside` in each of them.

  Ties prefer the earlier cluster or token.
  """
  best_first = jnp.argsort(-scores, stable=True)
  # Inverts the permutation: from a cluster to its place in the order.
  rank = (
    jnp.zeros_like(best_first)
    .at[best_first]
    .set(jnp.arange(len(scores), dtype=best_first.dtype))
  )
  token_rank = jnp.where(prefix, rank[cluster].astype(jnp.int32), len(scores))
  ones = prefix.astype(jnp.int32)
  sizes = jax.ops.segment_sum(ones, token_rank, len(scores) + 1)[:-1]
  return ClusterRanking(
    jnp.where(prefix, finite(inside), -jnp.inf),
    # A valid index for every token; callers mask those outside the prefix.
    jnp.minimum(token_rank, len(scores) - 1),
    sizes,
  )


def without(
  ranking: ClusterRanking, tokens: Bool[Array, " T"]
) -> ClusterRanking:
  """Takes tokens that are kept anyway out of their clusters."""
  count = jax.ops.segment_sum(
    tokens.astype(jnp.int32), ranking.cluster, len(ranking.sizes)
  )
  return replace(
    ranking,
    sizes=ranking.sizes - count,
    inside=jnp.where(tokens, -jnp.inf, ranking.inside),
  )


def select_fitting(
  ranking: ClusterRanking, budget: Int[Array, ""], cut: Cut
) -> Bool[Array, " T"]:
  """Selects the tokens of the best clusters that fit, and of the cut one.

  Args:
    ranking: ranking of one head's tokens.
    budget: how many tokens may be kept.
    cut: how the first cluster that does not fit is treated; see `ProtoKV`.
  """
  ends = jnp.cumsum(ranking.sizes)
  # The ends never decrease, so clusters that fit are the first in the order.
  if cut == "none":
    return ends[ranking.cluster] <= budget
  if cut in ("score", "position"):
    num_whole = jnp.sum(ends <= budget, dtype=jnp.int32)
    full = jnp.max(ends, initial=0, where=ends <= budget)
    of_cut = jnp.where(ranking.cluster == num_whole, ranking.inside, -jnp.inf)
    return (ranking.cluster < num_whole) | among_largest(of_cut, budget - full)

  # With "skip", whether a cluster fits depends on all that were taken before
  # it, so it takes a scan instead of a cumulative sum.
  def visit(
    remaining: Int[Array, ""], size: Int[Array, ""]
  ) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    fits = size <= remaining
    return remaining - jnp.where(fits, size, 0), fits

  _, fits = jax.lax.scan(visit, budget, ranking.sizes)
  return fits[ranking.cluster]
