"""Clusters of tokens in the order of their worth, and how many of them fit."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.select import among_largest
from kvjax.selection import finite
from kvjax.struct import struct

Cut = Literal["score", "position", "skip", "none"]


@struct
class Ranking:
  """The order in which clusters, and the tokens of a cluster, are kept.

  Attributes:
    inside: a token's worth inside its cluster; -inf outside the prefix.
    cluster: the place of each token's cluster among the clusters.
    sizes: tokens of each cluster, best cluster first.
  """

  inside: Float[Array, "*B T"]
  cluster: Int[Array, "*B T"]
  sizes: Int[Array, "*B P"]


def cluster_worth(
  own: Float[Array, " T"],
  cluster: Int[Array, " T"],
  prefix: Bool[Array, " T"],
  count: int,
  mean: bool,
) -> Float[Array, " P"]:
  """Sum or mean of the members' own worth; 0 for an empty cluster.

  Args:
    own: worth of every token.
    cluster: of every token.
    prefix: the tokens that count.
    count: P, clusters.
    mean: divide by the number of members.
  """
  target = jnp.where(prefix, cluster, count)
  worth = jax.ops.segment_sum(own, target, count + 1)[:-1]
  if not mean:
    return worth
  ones = jnp.ones(own.shape, jnp.float32)
  sizes = jax.ops.segment_sum(ones, target, count + 1)[:-1]
  return worth / jnp.maximum(sizes, 1.0)


def ranked(
  cluster: Int[Array, " T"],
  worth: Float[Array, " P"],
  prefix: Bool[Array, " T"],
  inside: Float[Array, " T"],
) -> Ranking:
  """Clusters by their worth, and tokens by `inside` in each of them.

  Where either is equal, the first comes first.
  """
  best_first = jnp.argsort(-worth, stable=True)
  rank = (
    jnp.zeros_like(best_first)
    .at[best_first]
    .set(jnp.arange(len(worth), dtype=best_first.dtype))
  )
  mine = jnp.where(prefix, rank[cluster].astype(jnp.int32), len(worth))
  ones = prefix.astype(jnp.int32)
  sizes = jax.ops.segment_sum(ones, mine, len(worth) + 1)[:-1]
  return Ranking(
    jnp.where(prefix, finite(inside), -jnp.inf),
    jnp.minimum(mine, len(worth) - 1),
    sizes,
  )


def fitting(
  found: Ranking, room: Int[Array, ""], cut: Cut
) -> Bool[Array, " T"]:
  """Tokens of the whole clusters that fit, best first, and of the cut one.

  Args:
    found: the order of one head's tokens.
    room: how many may be kept.
    cut: what becomes of the first cluster that does not fit; see `ProtoKV`.
  """
  ends = jnp.cumsum(found.sizes)
  if cut == "none":
    return ends[found.cluster] <= room
  if cut in ("score", "position"):
    whole = jnp.sum((ends <= room).astype(jnp.int32))
    full = jnp.max(ends, initial=0, where=ends <= room)
    of_cut = jnp.where(found.cluster == whole, found.inside, -jnp.inf)
    return (found.cluster < whole) | among_largest(of_cut, room - full)

  def visit(
    left: Int[Array, ""], size: Int[Array, ""]
  ) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    fits = size <= left
    return left - jnp.where(fits, size, 0), fits

  _, fits = jax.lax.scan(visit, room, found.sizes)
  return fits[found.cluster]
