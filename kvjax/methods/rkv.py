"""R-KV: keep important tokens that others do not repeat."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.heads import by_kv_head
from kvjax.kernels.dispatch import on_mesh
from kvjax.kernels.select import mask_to_slots
from kvjax.methods.base import ScoringMethod
from kvjax.methods.last_queries import window_queries
from kvjax.methods.snapkv import pool
from kvjax.methods.softmax import softmax
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least, check_odd, check_share
from kvjax.selection import floor_share, last_tokens

# Keys whose cosines are computed together.
_TILE = 128
_TINY = 1e-8
# Above all slots.
_NEVER = 2**31 - 1
# The number of the next tile to search, how many similar keys each row has met
# before it, and the slot that each row leaves out, -1 before it is found.
_Search = tuple[Int[Array, ""], Int[Array, "B K R"], Int[Array, "B K R"]]


@dataclasses.dataclass(frozen=True)
class RKV(ScoringMethod):
  """Mixes the importance of tokens with their redundancy.

  Importance I is the attention of the last W queries to the tokens before
  them: the group's maximum of the logits, its softmax over these tokens, the
  mean over the queries, and a maximum over neighbors. Redundancy R is the
  softmax, over all tokens, of the mean cosine of a key with every key. For each
  key, the newest of those that resemble it is left out of the mean, so that
  the last of many repetitions is not redundant. The score is
  lambda I - (1 - lambda) R.

  R is close to one over the number of tokens, so that lambda depends on the
  budget.

  Source: Cai et al., arXiv 2505.24133, Section 3, and the authors' code, which
  takes the redundancy of the first row for the whole batch; here every row has
  its own.

  Attributes:
    window: W, number of last tokens, which are always kept.
    kernel: odd width of the maximum over neighbors; 1 for none.
    importance: lambda, weight of the attention.
    threshold: cosine above which two keys resemble each other.
    spared: which of the keys that resemble a key is left out: the "last" or the
      "first".
    spared_share: leave out the one at this share of all tokens, counted among
      those that resemble the key from that end; 0 for the end itself.
    spares_first: whether, for a key that no other resembles, the first token is
      left out, as in the authors' code.
  """

  window: int = 8
  kernel: int = 7
  importance: float = 0.1
  threshold: float = 0.5
  spared: Literal["last", "first"] = "last"
  spared_share: float = 0.0
  spares_first: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, window=1, threshold=0)
    check_odd(self, "kernel")
    check_share(self, "importance")
    check_share(self, "spared_share")

  @property
  def traits(self) -> Traits:
    """It reads the last W queries and keeps their tokens."""
    return Traits(window=self.window, queries=self.window, protects=self.window)

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes lambda I - (1 - lambda) R; of empty slots they are arbitrary."""
    del layer
    share = self.importance
    # All or nothing, so that the other half need not be computed.
    redundancy = self.redundancy(cache) if share < 1 else 0.0
    importance = self.attention(cache, activations) if share > 0 else 0.0
    scores = share * importance - (1 - share) * redundancy
    return jnp.broadcast_to(scores, cache.positions.shape)

  def attention(
    self, cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes I; 0 for the window."""
    queries, positions = window_queries(cache, activations, self.window)
    options, kv_heads = activations.attention, cache.keys.shape[1]
    prefix = cache.valid & ~last_tokens(cache.valid, self.window)
    keys = cache.float_keys
    queries = by_kv_head(queries.astype(jnp.float32), kv_heads)
    logits = jnp.einsum("bkgwd,bktd->bkgwt", queries, keys)
    logits = options.cap(logits * options.scale_of(keys.shape[-1]))
    real = (positions >= 0)[:, None, :, None]
    # Neither of the window nor of queries that the row does not have.
    counted = real & prefix[:, :, None]
    sinks = activations.sinks
    if sinks is not None:
      # As those of keys, the highest logit of the group counts.
      of_group = by_kv_head(sinks.astype(jnp.float32)[None], kv_heads)
      sinks = jnp.max(of_group, axis=2)[..., None, None]
    weights = softmax(jnp.max(logits, axis=2), counted, sinks)
    count = jnp.maximum(jnp.sum(real.astype(jnp.float32), axis=2), 1.0)
    mean = jnp.sum(weights, axis=2) / count
    return pool(mean, prefix, self.kernel, "max")

  def redundancy(self, cache: LayerCache) -> Float[Array, "B K T"]:
    """Computes R; 0 for empty slots. Memory is linear in T."""
    valid, keys = cache.valid, cache.float_keys
    units = keys / (jnp.linalg.norm(keys, axis=-1, keepdims=True) + _TINY)
    # Each device searches as far as its own keys need.
    spared = on_mesh(self._all_spared, (units, valid), ("BK", "BK"), "BK")
    others = jnp.sum(units, axis=2, keepdims=True) - units
    # Sums over all keys at once: the matrix of cosines is only searched.
    sums = jnp.sum(units * others, axis=-1)
    left_out = jnp.take_along_axis(units, spared[..., None], axis=2)
    itself = spared == jax.lax.broadcasted_iota(jnp.int32, spared.shape, 2)
    cosines = jnp.where(itself, 0.0, jnp.sum(units * left_out, axis=-1))
    add = jax.vmap(jax.vmap(lambda row, at, x: row.at[at].add(x)))
    sums = add(sums, spared, -cosines)
    count = jnp.sum(valid.astype(jnp.float32), axis=-1, keepdims=True)
    return softmax(sums / jnp.maximum(count, 1.0), valid)

  def _all_spared(
    self, units: Float[Array, "B K T D"], valid: Bool[Array, "B K T"]
  ) -> Int[Array, "B K T"]:
    """For each key, the slot of the one that is left out of its row."""
    batch, kv_heads, capacity = valid.shape
    tiles = -(-capacity // _TILE)
    extra = [(0, 0), (0, 0), (0, tiles * _TILE - capacity)]
    units, real = jnp.pad(units, [*extra, (0, 0)]), jnp.pad(valid, extra)
    rank = jnp.ones((batch, kv_heads), jnp.int32)
    if self.spared_share:
      count = jnp.sum(valid, axis=-1, dtype=jnp.int32)
      rank = jnp.maximum(floor_share(count, self.spared_share), 1)

    # Most rows find theirs in the first tile of keys. Only the others go on,
    # side by side, as a tile of rows is searched until all of it have found.
    every = jax.lax.broadcasted_iota(jnp.int32, real.shape, 2)
    slots = jnp.where(real, every, -1)
    none = jnp.zeros_like(slots)
    seen, spared = self._search(units, slots, none, 0, 1, units, rank)
    left = real & (spared < 0)
    rest = mask_to_slots(left, tiles * _TILE)
    most = jnp.max(jnp.sum(left, axis=-1, dtype=jnp.int32))

    def go_on(
      state: tuple[Int[Array, ""], Int[Array, "B K T"]],
    ) -> tuple[Int[Array, ""], Int[Array, "B K T"]]:
      tile, spared = state
      slots = _tile_of(rest, tile)
      rows = jnp.take_along_axis(units, slots[..., None], axis=2)
      met = jnp.take_along_axis(seen, slots, axis=2)
      _, found = self._search(rows, slots, met, 1, tiles, units, rank)
      # Out of bounds, where nothing is written, for -1.
      at = jnp.where(slots >= 0, slots, tiles * _TILE)
      put = jax.vmap(jax.vmap(lambda x, at, y: x.at[at].set(y, mode="drop")))
      return tile + 1, put(spared, at, found)

    _, spared = jax.lax.while_loop(
      lambda state: state[0] * _TILE < most,
      go_on,
      (jnp.zeros((), jnp.int32), spared),
    )
    spared = spared[..., :capacity]
    own = jax.lax.broadcasted_iota(jnp.int32, spared.shape, 2)
    first = jnp.argmax(valid, axis=-1).astype(jnp.int32)[..., None]
    return jnp.where(spared < 0, first if self.spares_first else own, spared)

  def _search(
    self,
    rows: Float[Array, "B K R D"],
    slots: Int[Array, "B K R"],
    seen: Int[Array, "B K R"],
    first: int,
    end: int,
    units: Float[Array, "B K T D"],
    rank: Int[Array, "B K"],
  ) -> tuple[Int[Array, "B K R"], Int[Array, "B K R"]]:
    """Searches the slot that is left out of each row.

    Tiles of keys are searched from the end that counts, until all rows have
    found theirs: keys resemble each other, so that most are never compared.

    Args:
      rows: keys of length 1.
      slots: slot of the key of each row; -1 for none.
      seen: how many similar keys each row has met in tiles before the first.
      first: number of the first tile to search, from the end that counts.
      end: one past the number of the last.
      units: keys of length 1, whole tiles of them; 0 for empty slots.
      rank: which of the keys that resemble a row's is left out, from 1 on.

    Returns:
      `seen` after these tiles, and the slots, -1 for none.
    """
    tiles, newest = units.shape[2] // _TILE, self.spared == "last"

    def unfinished(state: _Search) -> Bool[Array, ""]:
      step, _, found = state
      return (step < end) & jnp.any((slots >= 0) & (found < 0))

    def look(state: _Search) -> _Search:
      step, seen, found = state
      number = tiles - 1 - step if newest else step
      keys = _tile_of(units, number)
      # Keys are not the last axis: over that, CPUs reduce without vectors.
      cosines = jnp.einsum("bkcd,bkrd->bkcr", keys, rows)
      others = number * _TILE + jax.lax.broadcasted_iota(
        jnp.int32, (1, 1, _TILE, 1), 2
      )
      # Empty slots have a cosine of 0, which is not above any threshold.
      similar = (cosines > self.threshold) & (slots[:, :, None] != others)
      if self.spared_share:
        order = jax.lax.cumsum(
          similar.astype(jnp.int32), axis=2, reverse=newest
        )
        seen, similar = (
          seen + jnp.sum(similar, axis=2, dtype=jnp.int32),
          similar & (seen[:, :, None] + order == rank[..., None, None]),
        )
      if newest:
        best = jnp.max(jnp.where(similar, others, -1), axis=2)
      else:
        best = jnp.min(jnp.where(similar, others, _NEVER), axis=2)
        best = jnp.where(best == _NEVER, -1, best)
      return step + 1, seen, jnp.where(found < 0, best, found)

    start = jnp.asarray(first, jnp.int32), seen, jnp.full_like(slots, -1)
    _, seen, found = jax.lax.while_loop(unfinished, look, start)
    return seen, found


def _tile_of(
  x: Shaped[Array, "B K T *D"], number: Int[Array, ""]
) -> Shaped[Array, "B K C *D"]:
  """Returns a tile of slots."""
  return jax.lax.dynamic_slice_in_dim(x, number * _TILE, _TILE, axis=2)
