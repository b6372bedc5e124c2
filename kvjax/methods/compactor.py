"""Compactor: approximate leverage blended with non-causal attention."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.allocation.middle import Middle
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.methods.base import LayerBudget, Method
from kvjax.methods.leverage import Factor, Solver
from kvjax.methods.leverage_scores import LeverageScores
from kvjax.methods.noncausal import Scale, ValueNorm, noncausal_attention
from kvjax.methods.standardize import Scope, standardize
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least, check_odd
from kvjax.selection import head_counts, last_tokens, top_slots
from kvjax.struct import struct

Attention = Literal["noncausal", "none"]
Spread = Literal["head", "layer"]
Whole = Literal["row", "middle"]


@struct
class Parts:
  """The two standardized scores of every slot, zero for unscored slots."""

  attention: Float[Array, "B K T"]
  outlier: Float[Array, "B K T"]


@dataclasses.dataclass(frozen=True)
class Compactor(Method):
  """Keeps outlier keys and keys that their neighborhood attends to.

  The score is z(a) + blend z(o), with z the standardization. o is the leverage
  of the keys before RoPE, from a random sketch of them. a is the attention that
  a key receives from its chunk of the prompt, including later tokens, times the
  norm of its value and averaged with its neighbors. The method is
  query-agnostic and works on whole prompts only.

  Source: Chari and Van Durme, arXiv 2507.08143, Section 3.

  Attributes:
    blend: weight of the leverage; 0 uses attention alone.
    blend_removed: use the share of tokens to evict as the weight instead.
    attention: "noncausal", or "none" to score by leverage alone.
    sketch: "gaussian", "srht" (randomized Hadamard), or "none" for exact
      leverage.
    sketch_dim: k, columns of the sketch. Keys of at most k dimensions are not
      sketched, since a sketch that wide does not change the leverage. Solver
      "chol" sketches them nevertheless, as in kvpress: the effect of its jitter
      depends on the sketch.
    solver: how leverage is computed; see `kvjax.methods.leverage`.
    center: subtract the mean key first.
    leverage_chunk: tokens per chunk of the leverage; 0 for a single chunk.
    chunk: C, tokens per chunk of attention.
    scale: of the logits: 1, or "rsqrt_d" for the layer's own.
    value_norm: "l2", "l1", or "none".
    pool: odd width of the average over neighbors; 1 is none.
    z_scope: standardize per "head", or over all heads of a "layer", or of each
      "chunk" of the leverage, the attention then over the layer.
    first: number of first tokens that are always kept.
    last: number of last tokens that are always kept.
    score_ends: include the first and last tokens in the chunks and statistics
      of the scores; if not, the tokens between them are scored alone.
    retention_of: what a retention is a share of: the whole "row", or its
      "middle" between the first and last tokens. With "middle", the first and
      last tokens are kept even if they exceed that share.
    spread: "head" keeps the same number of tokens in every head. "layer" keeps
      the best slots over all heads of a layer, as many as one head's budget
      times the number of heads; a retention is then rounded once, to the
      nearest integer, for all heads together.
    seed: seed of the sketches, which differ between layers and KV heads.
  """

  blend: float = 0.3
  blend_removed: bool = False
  attention: Attention = "noncausal"
  sketch: Factor = "gaussian"
  sketch_dim: int = 64
  solver: Solver = "svd"
  center: bool = False
  leverage_chunk: int = 0
  chunk: int = 256
  scale: Scale = "one"
  value_norm: ValueNorm = "l2"
  pool: int = 3
  z_scope: Scope = "head"
  first: int = 0
  last: int = 0
  score_ends: bool = False
  retention_of: Whole = "row"
  spread: Spread = "head"
  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, sketch_dim=1, chunk=1, leverage_chunk=0, first=0, last=0)
    check_least(self, blend=0)
    if self.attention == "none" and not (self.blend or self.blend_removed):
      raise InputError(
        "Compactor needs a blend above 0 if its attention is none; nothing "
        "would be scored."
      )
    check_odd(self, "pool")

  @property
  def traits(self) -> Traits:
    """It needs keys before RoPE, and its sketches are random."""
    return Traits(
      whole_prompts_only=(
        "its leverage and its attention are those of a whole prompt"
      ),
      stochastic=self.sketch != "none",
      activations=frozenset({"keys_unrotated"}),
    )

  @property
  def allocation(self) -> Middle:
    """The allocation that `retention_of` and `spread` define."""
    ends = self.first + self.last if self.retention_of == "middle" else 0
    return Middle(ends, joint=self.spread == "layer")

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Parts:
    """Computes both scores, standardized."""
    scored, start = cache.valid, 0
    if not self.score_ends:
      scored &= ~self._ends(cache)
      # Chunks begin after the first tokens, if there are any tokens then.
      start = self.first if self.first < cache.capacity else 0
    # The first tokens are in the same slots of all rows and are cut off; the
    # last ones are not, and are only masked.
    valid = scored[:, :, start:]
    attention = jnp.zeros(valid.shape, jnp.float32)
    if self.attention == "noncausal":
      attention = self._attention(cache, activations, valid, start)
    assert activations.keys_unrotated is not None
    keys, size = activations.keys_unrotated[:, :, start:], self.leverage_chunk
    outlier = LeverageScores(
      self.sketch, self.sketch_dim, self.solver, self.center, size, self.seed
    ).of_keys(layer, keys, valid)
    before = ((0, 0), (0, 0), (start, 0))
    attention, outlier = jnp.pad(attention, before), jnp.pad(outlier, before)
    return Parts(
      standardize(attention, scored, self.z_scope),
      standardize(outlier, scored, self.z_scope, size, start),
    )

  def select(
    self, scores: Parts, cache: LayerCache, budget: LayerBudget
  ) -> Int[Array, "B K M"]:
    """Selects the protected ends and the highest blended scores."""
    valid, must_keep = cache.valid, budget.must_keep(cache)
    ends = self._ends(cache) | must_keep
    counts, capacity = budget.counts, budget.capacity
    # Not in `evaluate`, as the weight of `blend_removed` depends on the budget.
    blended = self._blend(scores, valid, budget)
    if self.spread == "layer":
      protected = jnp.sum(ends, axis=-1, dtype=jnp.int32)
      protected = jnp.minimum(protected, counts[:, None])
      kv_heads = valid.shape[1]
      total = budget.total
      if total is None:
        total = kv_heads * counts
      # A share of the middle may be less than the ends, which are kept anyway.
      ends_kept = jnp.sum(protected, axis=-1, dtype=jnp.int32)
      free = jnp.maximum(total - ends_kept, 0)
      counts = protected + head_counts(blended, valid & ~ends, free)
      # One head may win the budget of the whole layer.
      capacity = min(kv_heads * capacity, cache.capacity)
    return top_slots(blended, valid, ends, counts, capacity, must_keep)

  def token_scores(
    self, scores: Parts, cache: LayerCache
  ) -> Float[Array, "B K T"]:
    """Blends the scores; with `blend_removed`, as if half were removed."""
    del cache
    blend = 0.5 if self.blend_removed else self.blend
    return scores.attention + blend * scores.outlier

  def group_scores(
    self, scores: Parts, cache: LayerCache, budget: LayerBudget
  ) -> Float[Array, "B K T"]:
    """The blended scores; the ends have the highest of the row."""
    blended = self._blend(scores, cache.valid, budget)
    ends = self._ends(cache)
    scored = cache.valid & ~ends
    highest = jnp.max(
      blended, axis=(1, 2), keepdims=True, initial=-jnp.inf, where=scored
    )
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    return jnp.where(ends, highest, blended)

  def _blend(
    self, scores: Parts, valid: Bool[Array, "B K T"], budget: LayerBudget
  ) -> Float[Array, "B K T"]:
    """Adds both scores, with the weight that the options define."""
    counts = budget.counts
    # Heads of a whole prompt have the same tokens; the first stands for all.
    length = jnp.sum(valid[:, 0], axis=-1, dtype=jnp.int32)
    blend = jnp.full(counts.shape, self.blend, jnp.float32)
    if self.blend_removed:
      share = budget.share
      if share is None:
        share = counts.astype(jnp.float32) / length.astype(jnp.float32)
      blend = 1.0 - share
    return scores.attention + blend[:, None, None] * scores.outlier

  def _attention(
    self,
    cache: LayerCache,
    activations: Activations,
    valid: Bool[Array, "B K M"],
    start: int,
  ) -> Float[Array, "B K M"]:
    """The attention that slots receive from `start` on."""
    return noncausal_attention(
      activations.queries[:, :, start:],
      cache.keys[:, :, start:],
      cache.float_values[:, :, start:],
      valid,
      chunk=self.chunk,
      options=activations.attention,
      scale=self.scale,
      value_norm=self.value_norm,
      width=self.pool,
    )

  def _ends(self, cache: LayerCache) -> Bool[Array, "B K T"]:
    """The first and last tokens, which are always kept."""
    first = cache.valid & (cache.positions < self.first)
    return first | last_tokens(cache.valid, self.last)
