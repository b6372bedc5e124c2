"""TriAttention: keep keys that a model's queries look for at their distance."""

import dataclasses
from typing import Literal, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations, Rerotate
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.heads import by_kv_head
from kvjax.methods.base import LayerBudget, Method
from kvjax.methods.expected_attention import moments, queries_at_zero
from kvjax.methods.stored import Stored
from kvjax.methods.traits import Traits
from kvjax.methods.triattention_file import CENTER, LENGTHS, read_statistics
from kvjax.model import Geometry
from kvjax.options.bounds import check_least
from kvjax.selection import last_tokens, top_slots

_LEAST_DEVIATION = 1e-6


@dataclasses.dataclass(frozen=True)
class TriAttention(Method):
  """Scores a key by its product with the center of a head's later queries.

  RoPE rotates pairs of channels. For pair f, the queries at position 0 have the
  mean c_f and the mean length e_f, and a key has the length |k_f|. With
  R(p) the rotation to position p, t the number of tokens so far and d one of
  1, 2, 4, ..., the score for a query head is

    k.R(t + d) c + sum over f of (e_f - |c_f|) |k_f|

  The first part is the logit of the center, a trigonometric series in the
  distance; the second counts what queries deviate from it. Scores are averaged
  over d, standardized over the tokens that may go, and reduced over the group:
  the mixed score of a KV head.

  Source: arXiv 2604.04921 and the authors' code, whose rotation back to
  position 0 is one of the center here, which gives the same products.

  Attributes:
    statistics: file or folder with the statistics of the model's queries, as
      `kvjax.calibrate_queries` writes them, or the authors' code in a file
      named *.pt; empty for those of the prompt's own queries.
    farthest: the largest d, a power of 2.
    ahead: how the scores of all d are reduced.
    group: how those of the group's query heads are reduced.
    choice: what selects for itself. A KV head of a layer does by its mixed
      score (`per_layer_perhead` in the authors' code); a KV head of all layers
      by the mean of their mixed scores (`per_head`, the default of that code);
      the model, for all layers and heads, by the largest standardized score of
      any query head (`union`).
    center: whether the first part counts.
    spread: whether the second part counts.
    recent: number of last tokens that are always kept.
  """

  statistics: str = ""
  farthest: int = 65536
  ahead: Literal["mean", "max"] = "mean"
  group: Literal["max", "mean"] = "max"
  choice: Literal["layer_head", "head", "model"] = "layer_head"
  center: bool = True
  spread: bool = True
  recent: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, farthest=1, recent=0)
    below = 2 ** (self.farthest.bit_length() - 1)
    if self.farthest != below:
      raise InputError(
        "farthest must be a power of 2, as all distances ahead are; "
        f"{self.farthest} is between {below} and {2 * below}."
      )
    if self.statistics:
      _ = self._stored

  @property
  def traits(self) -> Traits:
    """It rotates the centers of queries."""
    reason = "without a file, its statistics are those of a whole prompt"
    return Traits(
      whole_prompts_only="" if self.statistics else reason,
      protects=self.recent,
      joins_heads=self.choice == "model",
      joins_layers=self.choice != "layer_head",
      queries=0 if self.statistics else None,
      activations=frozenset({"rerotate"}),
    )

  def check_model(self, geometry: Geometry) -> None:
    """Refuses a model with other heads than the statistics.

    Raises:
      InputError: they differ.
    """
    if self.statistics:
      for name in (CENTER, LENGTHS):
        self._stored.check(geometry, name, per_query_head=True)

  def load(self) -> PyTree:
    """Returns the statistics, if a file is named."""
    return dict(self._stored.arrays) if self.statistics else None

  def without_files(self) -> Self:
    """Names no file."""
    return dataclasses.replace(self, statistics="")

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K G T"]:
    """Computes the score of every slot for every query head."""
    assert activations.rerotate is not None
    rerotate, kv_heads = activations.rerotate, cache.keys.shape[1]
    keys = cache.float_keys
    center, lengths = self._queries(layer, activations)
    batch, heads = len(keys), center.shape[1]
    center = jnp.broadcast_to(center, (batch, *center.shape[1:]))
    shape = (batch, kv_heads, heads // kv_heads, keys.shape[2])
    scores = jnp.zeros(shape, jnp.float32)
    if self.center:
      scores += self._logits(cache, keys, center, rerotate)
    if self.spread:
      lengths = jnp.broadcast_to(lengths, center.shape)
      # Both channels of a pair have its length.
      shared = jnp.sum(_pairs(rerotate, keys.shape[-1]), axis=-1)
      deviation = lengths - pair_lengths(center, rerotate)
      deviation /= shared[None, None]
      scores += jnp.einsum(
        "bktd,bkgd->bkgt",
        pair_lengths(keys, rerotate),
        by_kv_head(deviation, kv_heads),
      )
    return scores

  def join(
    self,
    scores: Float[Array, "L B K G T"],
    cache: LayerCache,
    budget: LayerBudget,
  ) -> Float[Array, "B K T"]:
    """Standardizes the scores and reduces them over groups and layers."""
    counted = (cache.valid & ~budget.must_keep(cache))[None, :, :, None]
    standard = _standardize(scores, counted)
    if self.choice == "model":
      # In `union`, every query head proposes as many tokens as are kept. No
      # better ones of that head are left out, so that the best of all heads are
      # among the proposals.
      best = jnp.max(standard, axis=(0, 2, 3))
      return jnp.broadcast_to(best[:, None], cache.positions.shape)
    reduce = jnp.max if self.group == "max" else jnp.mean
    return jnp.mean(reduce(standard, axis=3), axis=0)

  def select(
    self,
    scores: Float[Array, "B K G T"] | Float[Array, "B K T"],
    cache: LayerCache,
    budget: LayerBudget,
  ) -> Int[Array, "B K M"]:
    """Selects the tokens with the highest scores, those of `join`."""
    if scores.ndim == 4:
      scores = self.join(scores[None], cache, budget)
    valid = cache.valid
    return top_slots(
      scores,
      valid,
      last_tokens(valid, self.recent),
      budget.counts,
      budget.capacity,
      budget.must_keep(cache),
    )

  @property
  def _stored(self) -> Stored:
    return read_statistics(self.statistics)

  def _queries(
    self, layer: Int[Array, ""], activations: Activations
  ) -> tuple[Float[Array, "#B N D"], Float[Array, "#B N D"]]:
    """Centers of the queries at position 0, and the lengths of their pairs."""
    weights = self.weights_of(activations)
    if weights is not None:
      return weights[CENTER][layer][None], weights[LENGTHS][layer][None]
    queries, counted = queries_at_zero(activations)
    assert activations.rerotate is not None
    center, _ = moments(queries, counted, covariance=False)
    lengths, _ = moments(
      pair_lengths(queries, activations.rerotate), counted, covariance=False
    )
    return center, lengths

  def _logits(
    self,
    cache: LayerCache,
    keys: Float[Array, "B K T D"],
    center: Float[Array, "B N D"],
    rerotate: Rerotate,
  ) -> Float[Array, "B K G T"]:
    """Products of keys with the center at later positions."""
    offsets = 2 ** jnp.arange(self.farthest.bit_length(), dtype=jnp.int32)
    shape = (*center.shape[:2], offsets.size)
    moved = rerotate(
      jnp.broadcast_to(center[:, :, None], (*shape, center.shape[-1])),
      jnp.broadcast_to(offsets[None, None], shape),
    )
    if self.ahead == "mean":
      # Rotations are linear, so that the mean query has the mean logit.
      moved = jnp.mean(moved, axis=2, keepdims=True)
    now = jnp.max(cache.positions, axis=(1, 2))[:, None, None] + 1
    moved = rerotate(moved, jnp.broadcast_to(now, moved.shape[:3]))
    moved = by_kv_head(moved, keys.shape[1])

    def later(
      number: Int[Array, ""], best: Float[Array, "B K G T"]
    ) -> Float[Array, "B K G T"]:
      query = jax.lax.dynamic_index_in_dim(moved, number, 3, keepdims=False)
      return jnp.maximum(best, jnp.einsum("bktd,bkgd->bkgt", keys, query))

    first = jnp.einsum("bktd,bkgd->bkgt", keys, moved[:, :, :, 0])
    return jax.lax.fori_loop(1, moved.shape[3], later, first)


def pair_lengths(
  x: Float[Array, "*B D"], rerotate: Rerotate
) -> Float[Array, "*B D"]:
  """Length of the pair of every channel; of a channel that none rotates, |x|.

  Args:
    x: vectors, rotated or not.
    rerotate: the rotation, which says what the pairs are.
  """
  return jnp.sqrt(jnp.square(x) @ _pairs(rerotate, x.shape[-1]))


def _pairs(rerotate: Rerotate, dim: int) -> Float[Array, "D D"]:
  """1 where two channels are rotated into each other, and for each itself."""
  units = jnp.eye(dim, dtype=jnp.float32)[None, None]
  turned = rerotate(units, jnp.ones((1, 1, dim), jnp.int32))[0, 0]
  return (turned != 0).astype(jnp.float32)


def _standardize(
  scores: Float[Array, "L B K G T"], counted: Bool[Array, "1 B K 1 T"]
) -> Float[Array, "L B K G T"]:
  """Subtracts the mean over some slots and divides by their deviation."""
  weights = counted.astype(jnp.float32)
  count = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1.0)
  centered = jnp.where(counted, scores, 0.0)
  centered -= jnp.sum(centered, axis=-1, keepdims=True) / count
  square = jnp.where(counted, jnp.square(centered), 0.0)
  deviation = jnp.sqrt(jnp.sum(square, axis=-1, keepdims=True) / count)
  return centered / jnp.maximum(deviation, _LEAST_DEVIATION)
