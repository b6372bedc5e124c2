"""Ranking of listed slots by their keys, and attention to the best of them.

The host does both, on arrays in its own memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.host import run_on_host
from kvjax.kernels.sparse_decode.xla import (
  LOWEST,
  Empty,
  Sums,
  sum_listed,
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
  first: Int[Array, "B K"],
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
    first: number of first slots that a head attends to instead, whatever their
      rank; -1 for none.
    attended: the candidates to attend to; None for all of them.
    listed: the candidates to return; None for none.
    options: scale and softcap.
    layer: index of the layer in stacks.

  Returns:
    The attention, and the listed slots, ascending, then -1.
  """
  (keys, values), layer = as_stack((keys, values), layer)
  slots, width = keys.shape[-2], candidates.shape[-1]

  def run(
    queries: Float[Array, "B N D"],
    keys: Float[Array, "L B K T D"],
    values: Float[Array, "L B K T Dv"],
    layer: Int[Array, ""],
    candidates: Int[Array, "B K U"],
    first: Int[Array, "B K 1"],
    counts: list[Int[Array, "B K 1"]],
    places: Int[Array, "1 1 U"],
    empty: Empty,
  ) -> tuple[Sums, list[Int[Array, "B K _"]]]:
    found = candidates
    lists = []
    if sizes:
      pick = _rank(
        options.rescale(queries).astype(jnp.float32),
        take_listed(keys, layer, candidates).astype(jnp.float32),
        candidates,
        places,
        slots,
        empty,
      )
      lists = [pick(*best) for best in zip(counts, sizes, strict=True)]
      if attended is not None:
        found, *lists = lists
    places = places[..., : found.shape[-1]]
    firsts = _choose(places < first, places, -1)
    found = jnp.where(first >= 0, firsts, found)
    attention = sum_listed(
      queries,
      take_listed(keys, layer, found),
      take_listed(values, layer, found),
      found >= 0,
      None,
      empty,
      options,
    )
    return attention, lists

  bests = [best for best in (attended, listed) if best is not None]
  sizes = [min(best.size, width) for best in bests]
  # The host must not create arrays, so that it gets the numbers of places, too.
  places = jnp.arange(width, dtype=jnp.int32)[None, None]
  counts = [best.counts[..., None] for best in bests]
  empty = Empty.of(values.dtype)
  operands = candidates, first[..., None], counts, places, empty
  sums: Sums
  sums, lists = run_on_host(run, queries, keys, values, layer, *operands)
  return sums.finish(queries.dtype), lists[0] if lists else None


def _rank(
  queries: Float[Array, "B N D"],
  keys: Float[Array, "B K U D"],
  candidates: Int[Array, "B K U"],
  places: Int[Array, "1 1 U"],
  slots: int,
  empty: Empty,
) -> Callable[[Int[Array, "B K 1"], int], Int[Array, "B K M"]]:
  """Ranks candidates; returns a function that lists a number of the best."""
  batch, kv_heads, _, dim = keys.shape
  grouped = queries.reshape(batch, kv_heads, -1, dim)
  logits = jnp.einsum("bkgd,bkud->bkgu", grouped, keys) * dim**-0.5
  valid = candidates >= 0
  weights = _max_weights(logits, valid, empty)
  # NaN is never ranked. Other weights are not negative, so that their bits are
  # in their order.
  ranked = valid & (weights >= 0)
  bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
  # Stable, so that the lower slot wins among equal weights.
  _, best_first = jax.lax.sort(
    (-_choose(ranked, bits, -1), candidates), num_keys=1, is_stable=True
  )
  available = jnp.sum(ranked, axis=-1, keepdims=True, dtype=jnp.int32)

  def pick(count: Int[Array, "B K 1"], size: int) -> Int[Array, "B K M"]:
    chosen = places[..., :size] < jnp.minimum(count, available)
    ascending = jax.lax.sort(_choose(chosen, best_first[..., :size], slots))
    return _choose(ascending < slots, ascending, -1)

  return pick


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
