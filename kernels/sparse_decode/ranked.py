"""Ranking of listed slots by their keys, and attention to the best of them.

The host does both, on arrays in its own memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.host_memory import run_on_host
from kvjax.kernels.sparse_decode.xla import (
  LOWEST,
  Empty,
  Sums,
  listed_logits,
  sum_values,
  take_listed,
)
from kvjax.kernels.stacks import Layer, as_stack


class Best(NamedTuple):
  """The best candidates of each KV head.

  Attributes:
    counts: how many of them.
    size: maximum of the counts.
  """

  counts: Int[Array, "B K"]
  size: int


def ranked_decode_host(
  queries: Float[Array, "B N D"],
  keys: Float[Array, "*L B K T D"],
  values: Float[Array, "*L B K T Dv"],
  candidates: Int[Array, "B K U"],
  attended: Best | None,
  listed: Best | None,
  options: AttentionOptions = PLAIN,
  layer: Layer = None,
) -> tuple[Partial, Int[Array, "B K R"] | None]:
  """Ranks candidates by their keys and attends to the best, on the host.

  A candidate is ranked by its softmax weight among the candidates, without a
  softcap, the maximum over the query heads of its KV head. Among equal weights
  the lower slot wins. Only queries, candidates and counts go to the host; only
  the attention and the listed slots come back.

  Args:
    queries: as for `sparse_decode`.
    keys: as for `sparse_decode`, in host memory.
    values: as for `sparse_decode`, in host memory.
    candidates: slots to rank, ascending and unique, then -1.
    attended: the candidates to attend to; None for all of them.
    listed: the candidates to return; None for none.
    options: scale and softcap.
    layer: index of the layer in stacks.

  Returns:
    The attention, and the listed slots, ascending, then -1.
  """
  (keys, values), layer = as_stack((keys, values), layer)
  width = candidates.shape[-1]

  def run(
    queries: Float[Array, "B N D"],
    keys: Float[Array, "L B K T D"],
    values: Float[Array, "L B K T Dv"],
    layer: Int[Array, ""],
    candidates: Int[Array, "B K U"],
    counts: list[Int[Array, "B K 1"]],
    places: Int[Array, "1 1 U"],
    empty: Empty,
  ) -> tuple[Sums, list[Int[Array, "B K _"]]]:
    keys = take_listed(keys, layer, candidates).astype(jnp.float32)
    queries = queries.astype(jnp.float32)
    logits = listed_logits(queries, keys, options)
    found, lists = candidates, []
    if sizes:
      pick = _rank(logits, candidates >= 0, places, empty)
      picked = [pick(*best) for best in zip(counts, sizes, strict=True)]
      lists = [_choose(at >= 0, _take(candidates, at), -1) for at in picked]
      if attended is not None:
        found, *lists = lists
        grouped = logits.reshape(*candidates.shape[:2], -1, width)
        logits = _take(grouped, picked[0][:, :, None])
        logits = logits.reshape(*queries.shape[:2], -1)
    values = take_listed(values, layer, found)
    return sum_values(logits, values, found >= 0, None, empty, options), lists

  bests = [best for best in (attended, listed) if best is not None]
  sizes = [min(best.size, width) for best in bests]
  # The host must not create arrays, so that it gets the numbers of places, too.
  places = jnp.arange(width, dtype=jnp.int32)[None, None]
  counts = [best.counts[..., None] for best in bests]
  empty = Empty.of(values.dtype)
  operands = candidates, counts, places, empty
  sums: Sums
  sums, lists = run_on_host(run, queries, keys, values, layer, *operands)
  return sums.finish(queries.dtype), lists[0] if lists else None


def _rank(
  logits: Float[Array, "B N U"],
  valid: Bool[Array, "B K U"],
  places: Int[Array, "1 1 U"],
  empty: Empty,
) -> Callable[[Int[Array, "B K 1"], int], Int[Array, "B K M"]]:
  """Ranks candidates; returns a function that lists places of the best."""
  batch, kv_heads, width = valid.shape
  weights = _max_weights(
    logits.reshape(batch, kv_heads, -1, width), valid, empty
  )
  # NaN is never ranked. Other weights are not negative, so that their bits are
  # in their order.
  ranked = valid & (weights >= 0)
  bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
  # Stable, so that the lower slot wins among equal weights.
  _, best_first = jax.lax.sort(
    (-_choose(ranked, bits, -1), jnp.broadcast_to(places, valid.shape)),
    num_keys=1,
    is_stable=True,
  )
  available = jnp.sum(ranked, axis=-1, keepdims=True, dtype=jnp.int32)

  def pick(count: Int[Array, "B K 1"], size: int) -> Int[Array, "B K M"]:
    chosen = places[..., :size] < jnp.minimum(count, available)
    ascending = jax.lax.sort(_choose(chosen, best_first[..., :size], width))
    return _choose(ascending < width, ascending, -1)

  return pick


def _take(x: Shaped[Array, "B K *G U"], at: Int[Array, "B K *#G M"]) -> Array:
  """Takes entries at their places; arbitrary ones at place -1."""
  # XLA reads place 0 for -1. In any other mode, JAX creates arrays.
  return jnp.take_along_axis(x, at, axis=-1, mode="promise_in_bounds")


def _max_weights(
  logits: Float[Array, "B K G U"], valid: Bool[Array, "B K U"], empty: Empty
) -> Float[Array, "B K U"]:
  """Maximum softmax weight over the heads; arbitrary where not valid.

  As `kvjax.retrieval.weights.max_weights`, without arrays that the host would
  have to create.
  """
  logits = jnp.where(valid[:, :, None], logits, empty.logit)
  largest = jax.lax.reduce_max(logits, (logits.ndim - 1,))[..., None]
  # Finite even without candidates, since -inf - -inf is NaN.
  weights = jnp.exp(logits - jnp.maximum(largest, LOWEST))
  weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return jax.lax.reduce_max(weights, (2,))


def _choose(
  mask: Bool[Array, "B K M"], x: Int[Array, "*X"], other: int
) -> Int[Array, "B K M"]:
  """Replaces numbers by another; `where` with a constant creates an array."""
  return mask.astype(jnp.int32) * (x - other) + other
