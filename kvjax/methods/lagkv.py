"""LagKV: score a partition relative to the one that follows it."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation, Uniform
from kvjax.allocation.lag_law import LagLaw
from kvjax.allocation.partitions import Partitions
from kvjax.cache.heads import heads_of
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.heads import Head
from kvjax.kernels.select import among_largest, mask_to_slots
from kvjax.methods.base import LayerBudget, Method
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_layers, check_least, check_used
from kvjax.options.budgets import Retention
from kvjax.selection import finite, top_slots

Mode = Literal["paper", "kvpress"]
Reference = Literal["next", "own"]
Score = Literal["lag", "key_norm"]

_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class LagKV(Method):
  """Keeps the sinks, the best tokens of each partition, and a sliding window.

  After S sinks, the row is split into partitions of L tokens. Keys and values
  of partition p are scaled, channel by channel, to the range of partition
  p + 1. A token's score is the softmax, over its partition, of the standard
  deviation of its scaled channels, keys plus values. The last complete
  partition and the tokens after it are kept.

  With retention r, each scored partition keeps floor(r L) tokens. A row of n
  tokens keeps S + floor(r L) (P - 1) + L + (n - S) mod L of them, where
  P = floor((n - S) / L), and all n if n < S + 2 L. A budget in tokens is met as
  closely as that law allows, and so is a retention of the row
  (`retention_of`).

  Repeated eviction, in blocks or while decoding, follows the same law: tokens
  that were kept once are always kept, and only complete partitions are scored.
  In mode "kvpress", all tokens that are left are split and ranked anew.

  Source: Liang et al., arXiv 2504.04704, equations 1 to 8 and 13.

  Attributes:
    sinks: S, number of first tokens, which are always kept.
    lag: L, tokens of a partition.
    mode: "kvpress" ranks the tokens of each partition and keeps the highest
      ranks of the whole row, exactly to the budget, as in the paper's RULER
      runs.
    cross_scoring: in mode "kvpress", compare scores instead of ranks.
    value_weight: weight of the values' score; 0 uses keys only.
    ddof: 1 divides the channels' variance by D - 1.
    reference: "own" scales a partition to its own range (LocalKV).
    score: "key_norm" prefers keys of small norm instead (the paper's L2Norm).
    skip_layers: layers that keep everything.
    retention_of: what a retention is a share of: each scored "partition", as in
      the paper, or the "row", as for other methods, with which whole prompts
      alone can be compressed.
  """

  sinks: int = 16
  lag: int = 1024
  mode: Mode = "paper"
  cross_scoring: bool = False
  value_weight: float = 1.0
  ddof: int = 1
  reference: Reference = "next"
  score: Score = "lag"
  skip_layers: tuple[int, ...] = ()
  retention_of: Literal["partition", "row"] = "partition"

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, sinks=0, lag=2, value_weight=0)
    check_layers(self, "skip_layers")
    if self.ddof not in (0, 1):
      raise InputError(f"ddof must be 0 or 1; {self.ddof} is not.")
    ranked = self.mode == "kvpress"
    check_used(self, "mode", "retention_of" if ranked else "cross_scoring")
    if self.score == "key_norm":
      check_used(self, "score", "value_weight", "ddof", "reference")

  @property
  def traits(self) -> Traits:
    """In mode "paper", a fixed law gives the length of every head."""
    even = "it leaves layers whole" if self.skip_layers else ""
    if self.mode == "paper":
      even = 'it keeps the same share of every partition (mode="kvpress" ranks)'
    return Traits(
      even=even,
      # The law keeps them besides the budget.
      sinks=self.sinks if self.mode == "kvpress" else 0,
      keeps_layers=self.skip_layers,
      queries=0,
    )

  @property
  def allocation(self) -> Allocation:
    """The paper's law; in mode "kvpress", exactly the budget."""
    if self.mode == "kvpress":
      return Uniform()
    return LagLaw(self.sinks, self.lag, self.retention_of == "row")

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K P L"]:
    """Scores the tokens of every partition that another one follows."""
    del layer
    parts = self._partitions(cache)
    # The maximum number of complete partitions of a head. The last of them is
    # only a reference, so that P is one less.
    count = (cache.capacity - self.sinks) // self.lag
    if count < 2:
      return jnp.zeros((*parts.count.shape, 0, self.lag), jnp.float32)
    if self.score == "lag" and activations.positions.shape[1] == cache.capacity:
      scores = self._score_whole(cache, count)
    else:
      slots = parts.slots(cache, count)
      scores = jax.vmap(jax.vmap(self._score_head))(
        heads_of(cache, activations), slots
      )
    # Padding, which may be NaN, is in and after the last complete partition.
    number = jnp.arange(count - 1, dtype=jnp.int32)[None, None]
    scored = number < parts.num_complete[..., None] - 1
    return jnp.where(scored[..., None], scores, 0.0)

  def select(
    self,
    scores: Float[Array, "B K P L"],
    cache: LayerCache,
    budget: LayerBudget,
  ) -> Int[Array, "B K M"]:
    """Selects the best of each partition, or of the row in mode "kvpress"."""
    parts = self._partitions(cache)
    if self.mode == "kvpress":
      return self._best_of_row(parts, scores, cache, budget)
    must_keep = parts.collect(budget.must_keep(cache), cache, scores.shape[2])
    # In whole prompts they fit, which `LagLaw.check_protected` makes sure of.
    scores = jnp.where(must_keep, jnp.inf, finite(scores))
    per_partition = self._per_partition(parts, budget)[..., None]
    per_partition = jnp.broadcast_to(per_partition, scores.shape[:-1])
    # Partitions after the last scored one have arbitrary scores. Their tokens
    # are in the sliding window, which `fixed` keeps whatever is selected.
    best = parts.spread(among_largest(scores, per_partition))
    return mask_to_slots(cache.valid & (parts.fixed | best), budget.capacity)

  def token_scores(
    self, scores: Float[Array, "B K P L"], cache: LayerCache
  ) -> Float[Array, "B K T"]:
    """Scatters the scores of the partitions to their slots."""
    parts = self._partitions(cache)
    scored = (parts.num_complete >= 2)[..., None] & ~parts.fixed
    return jnp.where(scored, parts.spread(scores), -jnp.inf)

  def _partitions(self, cache: LayerCache) -> Partitions:
    if self.mode == "kvpress":
      # Split as if nothing had been evicted before.
      index = jnp.cumsum(cache.valid, axis=-1, dtype=jnp.int32) - 1
      places = jnp.where(cache.valid, index, -1)
      cache = dataclasses.replace(cache, positions=places)
    return Partitions.of(cache, self.sinks, self.lag)

  def _per_partition(
    self, parts: Partitions, budget: LayerBudget
  ) -> Int[Array, "B K"]:
    """Number of tokens to keep of each partition."""
    # Only repeated eviction sets `budget.budget`; `counts` are then of the
    # row. A share of each partition does not depend on the length, here 0.
    if isinstance(budget.budget, Retention):
      return jnp.full_like(
        parts.num_complete, LagLaw(self.sinks, self.lag).share(budget.budget, 0)
      )
    scored = parts.num_complete - 1
    # Inverts `LagLaw.counts`: what the fixed tokens leave, per partition.
    spare = budget.per_head - (parts.count - scored * self.lag)
    return spare // jnp.maximum(scored, 1)

  def _score_whole(
    self, cache: LayerCache, count: int
  ) -> Float[Array, "B K P L"]:
    """Scores a prompt of which nothing has been evicted, as it is stored.

    Slots that are those of a block alone are in the order of the text, without
    a gap, so that partitions are slices. XLA reads them where they are, and
    would store a gather of them in float32.
    """

    def deviation(x: Float[Array, "B K T D"]) -> Float[Array, "B K P L"]:
      x = x[:, :, self.sinks : self.sinks + count * self.lag]
      return self._deviation(x.reshape(*x.shape[:2], count, self.lag, -1))

    score = deviation(cache.keys)
    if self.value_weight:
      score = score + self.value_weight * deviation(cache.values)
    return score

  def _score_head(
    self, head: Head, slots: Int[Array, "P1 L"]
  ) -> Float[Array, "P L"]:
    if self.score == "key_norm":
      return -jnp.linalg.norm(head.keys[slots], axis=-1)[:-1]
    score = self._deviation(head.keys[slots])
    if self.value_weight:
      values = self._deviation(head.values[slots])
      score = score + self.value_weight * values
    return score

  def _deviation(self, x: Float[Array, "*H P1 L D"]) -> Float[Array, "*H P L"]:
    own = x[..., :-1, :, :]
    reference = x[..., 1:, :, :] if self.reference == "next" else own
    # In float32 only now: extremes of numbers as they are stored are the same.
    low, high, own = (
      each.astype(jnp.float32)
      for each in (
        jnp.min(reference, axis=-2, keepdims=True),
        jnp.max(reference, axis=-2, keepdims=True),
        own,
      )
    )
    # The authors' code has no floor: a channel without range gives inf or NaN.
    scaled = (own - low) / jnp.maximum(high - low, _EPSILON)
    return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=self.ddof), axis=-1)

  def _best_of_row(
    self,
    parts: Partitions,
    scores: Float[Array, "B K P L"],
    cache: LayerCache,
    budget: LayerBudget,
  ) -> Int[Array, "B K M"]:
    """Selects sinks, window and the best of all partitions.

    Tokens compete by rank, or by score with `cross_scoring`. A short row keeps
    its newest tokens.
    """
    short = (parts.num_complete < 2)[..., None]
    return top_slots(
      jnp.where(
        short,
        parts.index.astype(jnp.float32),
        parts.spread(self._compared(scores)),
      ),
      cache.valid,
      jnp.where(short, parts.index < self.sinks, parts.fixed),
      budget.counts,
      budget.capacity,
      budget.must_keep(cache),
    )

  def group_scores(
    self,
    scores: Float[Array, "B K P L"],
    cache: LayerCache,
    budget: LayerBudget,
  ) -> Float[Array, "B K T"]:
    """Ranks over L, or half of the scores with `cross_scoring`; fixed ones 1.

    In a row of less than S + 2 L tokens, which has no scores, later ones are
    higher after the sinks.
    """
    del budget
    parts = self._partitions(cache)
    # kvpress averages the scores of keys and values, which are summed here.
    scale = 2.0 if self.cross_scoring else float(self.lag)
    compared = parts.spread(self._compared(scores)) / scale
    order = (parts.index - self.sinks).astype(jnp.float32)
    after = jnp.maximum(parts.count - self.sinks, 1).astype(jnp.float32)
    short = (parts.num_complete < 2)[..., None]
    ranked = jnp.where(short, order / after[..., None], compared)
    fixed = jnp.where(short, parts.index < self.sinks, parts.fixed)
    return jnp.where(fixed, 1.0, ranked)

  def _compared(
    self, scores: Float[Array, "B K P L"]
  ) -> Float[Array, "B K P L"]:
    """What tokens compete by: their scores, or their ranks as floats."""
    if self.cross_scoring:
      return scores
    # Stable, so that of equal tokens the earlier one is the better.
    from_best = jnp.argsort(scores, axis=-1, descending=True)
    # The second sort inverts the first: ranks, 0 for the lowest score.
    places = jnp.argsort(from_best, axis=-1)
    return (scores.shape[-1] - 1 - places).astype(jnp.float32)
