"""LagKV: score a partition relative to the one that follows it."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.budgets import Budget, Retention
from kvjax.cache import LayerCache
from kvjax.errors import InputError
from kvjax.methods.base import Allowance, Head, Method, heads_of
from kvjax.prompts import bucket_lengths
from kvjax.selection import packed, top_slots

Mode = Literal["paper", "kvpress"]
Reference = Literal["next", "own"]
Score = Literal["lag", "key_norm"]

_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class LagKV(Method):
  """Keeps the sinks, the best tokens of each partition, and a sliding window.

  After S sinks the row is cut into partitions of L tokens. Keys and values of
  partition p are scaled, channel by channel, to the range of partition p + 1;
  a token's score is the softmax over its partition of the deviation of its
  scaled channels, keys plus values. The last whole partition and the rest
  after it stay as they are.

  With retention r each scored partition keeps floor(r L) tokens, so a row of n
  tokens keeps S + floor(r L) (P - 1) + L + (n - S) mod L of them, where
  P = floor((n - S) / L), and all n where n < S + 2 L. A budget in tokens is
  met as nearly as that law allows.

  Source: Liang et al., arXiv 2504.04704, equations 1 to 8 and 13.

  Attributes:
    sinks: S.
    lag: L.
    mode: "kvpress" ranks the tokens of each partition and keeps the highest
      ranks of the whole row, exactly to the budget, as the paper's RULER runs.
    cross_scoring: in mode "kvpress", compare scores instead of ranks.
    value_weight: of the values' score; 0 looks at keys only.
    ddof: 1 divides the channels' variance by D - 1.
    reference: "own" scales a partition to its own range (LocalKV).
    score: "key_norm" prefers small keys instead (the paper's L2Norm).
    skip_layers: layers that keep everything.
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

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.sinks < 0:
      raise InputError(f"sinks must be 0 or more; {self.sinks} is not.")
    if self.lag < 2:
      raise InputError(f"lag must be 2 or more; {self.lag} is not.")
    if self.ddof not in (0, 1):
      raise InputError(f"ddof must be 0 or 1; {self.ddof} is not.")

  def keeps_all(self, layer: int) -> bool:
    """True for the skipped layers."""
    return layer in self.skip_layers

  def kept(self, budget: Budget, length: int) -> int:
    """Tokens kept of a row: the law of the class docstring."""
    if self.mode == "kvpress":
      return budget.kept(length)
    if length < self.sinks + 2 * self.lag:
      return length
    scored = (length - self.sinks) // self.lag - 1
    fixed = self.sinks + self.lag + (length - self.sinks) % self.lag
    if isinstance(budget, Retention):
      each = int(budget.share * self.lag + 1e-9)
    else:
      each = round((budget.kept(length) - fixed) / scored)
    return fixed + scored * min(max(each, 0), self.lag)

  def capacity(self, budget: Budget, padded: int) -> int:
    """Most tokens that a row of the bucket of `padded` tokens keeps."""
    # The law falls by up to a lag whenever a partition is completed.
    return max(self.kept(budget, n) for n in bucket_lengths(padded))

  def evaluate(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> Float[Array, "B K P L"]:
    """Scores of the tokens of every partition that another one follows."""
    del layer
    return jax.vmap(jax.vmap(self._score_head))(heads_of(cache, seen))

  def select(
    self,
    found: Float[Array, "B K P L"],
    cache: LayerCache,
    allowance: Allowance,
  ) -> Int[Array, "B K M"]:
    """The best of each partition, or of the whole row in mode "kvpress"."""
    held = cache.positions >= 0
    lengths = jnp.sum(held[:, 0].astype(jnp.int32), axis=-1)
    partitions = (lengths - self.sinks) // self.lag
    rank = jnp.argsort(jnp.argsort(found, axis=-1), axis=-1)
    if self.mode == "kvpress":
      worth = found if self.cross_scoring else rank.astype(jnp.float32)
      scores = self._row_scores(worth, lengths, partitions, cache.capacity)
      return top_slots(
        scores, held, jnp.zeros_like(held), allowance.counts, allowance.capacity
      )
    scored = jnp.maximum(partitions - 1, 1)
    tail = self.lag + (lengths - self.sinks) % self.lag
    each = (allowance.counts - self.sinks - tail) // scored
    # Ties keep the lower position: rank from the best, stably.
    rank = jnp.argsort(jnp.argsort(-found, axis=-1, stable=True), axis=-1)
    best = self._spread(rank < each[:, None, None, None], cache.capacity, False)
    index = jnp.arange(cache.capacity)[None]
    whole = lengths < self.sinks + 2 * self.lag
    window = self.sinks + (partitions - 1) * self.lag
    fixed = (index < self.sinks) | (index >= window[:, None]) | whole[:, None]
    return packed(held & (fixed[:, None] | best), allowance.capacity)

  def _score_head(self, head: Head) -> Float[Array, "P L"]:
    if self.score == "key_norm":
      return -jnp.linalg.norm(self._partitions(head.keys), axis=-1)[:-1]
    score = self._deviation(self._partitions(head.keys))
    if self.value_weight:
      values = self._deviation(self._partitions(head.values))
      score = score + self.value_weight * values
    return score

  def _deviation(self, x: Float[Array, "P1 L D"]) -> Float[Array, "P L"]:
    reference = x[1:] if self.reference == "next" else x[:-1]
    low = jnp.min(reference, axis=1, keepdims=True)
    high = jnp.max(reference, axis=1, keepdims=True)
    scaled = (x[:-1] - low) / jnp.maximum(high - low, _EPSILON)
    return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=self.ddof), axis=-1)

  def _partitions(self, x: Float[Array, "T D"]) -> Float[Array, "P1 L D"]:
    """Whole partitions, and an empty one where there is none."""
    count = max((len(x) - self.sinks) // self.lag, 1)
    end = self.sinks + count * self.lag
    x = jnp.pad(x, ((0, max(end - len(x), 0)), (0, 0)))
    return x[self.sinks : end].reshape(count, self.lag, x.shape[1])

  def _spread(self, x: Array, slots: int, fill: bool | float) -> Array:
    """Per-token values of the partitions at their slots, `fill` elsewhere."""
    batch, kv_heads = x.shape[:2]
    flat = x.reshape(batch, kv_heads, -1)
    after = max(slots - self.sinks - flat.shape[-1], 0)
    wide = ((0, 0), (0, 0), (self.sinks, after))
    return jnp.pad(flat, wide, constant_values=fill)[..., :slots]

  def _row_scores(
    self,
    worth: Float[Array, "B K P L"],
    lengths: Int[Array, " B"],
    partitions: Int[Array, " B"],
    slots: int,
  ) -> Float[Array, "B K T"]:
    """Scores over the row; sinks and window are above every partition."""
    best = jnp.float32(2 * self.lag)
    index = jnp.arange(slots)[None]
    window = (self.sinks + (partitions - 1) * self.lag)[:, None]
    fixed = (index < self.sinks) | (index >= window)
    scores = self._spread(worth, slots, 0.0)
    scores = jnp.where(fixed[:, None], best, scores)
    short = (lengths < self.sinks + 2 * self.lag)[:, None]
    recency = jnp.where(index < self.sinks, best, index.astype(jnp.float32))
    return jnp.where(short[:, None], recency[:, None], scores)
