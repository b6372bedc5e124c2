"""Expected Attention: keep what later queries are expected to attend to."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.heads import by_kv_head
from kvjax.methods.base import ScoringMethod
from kvjax.methods.snapkv import value_norms
from kvjax.methods.softmax import softmax
from kvjax.methods.stored import Stored
from kvjax.methods.traits import Traits
from kvjax.model import Geometry
from kvjax.options.bounds import check_least


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(ScoringMethod):
  """Scores a token by the attention that later queries are expected to pay.

  The queries of the prompt, before RoPE, have the mean mu and the covariance
  Sigma in each query head. R is the rotation of RoPE, averaged over the next
  positions. If later queries are normal, E exp(q.k s) is exp of

    s k.R mu + s^2 / 2 k.R Sigma R^T k

  where s scales the logits. The score is its softmax over the keys, averaged
  over the group, times the norm of the value.

  Source: Devoto et al., arXiv 2510.00636, and the authors' code in kvpress. R
  is averaged before it is squared, as there.

  Attributes:
    future: number of later positions that R is averaged over.
    sinks: number of first tokens that are always kept. Neither their queries
      nor their keys count.
    covariance: whether Sigma counts; without it, the score is the attention of
      the mean query.
    value_norm: whether the score is multiplied by the norm of the value.
    epsilon: added to the attention before that.
    statistics: file or folder with stored means and covariances, as
      `kvjax.calibrate_queries` writes them or as they are published for
      kvpress; empty for those of the prompt's own queries.
  """

  future: int = 512
  sinks: int = 4
  covariance: bool = True
  value_norm: bool = True
  epsilon: float = 0.0
  statistics: str = ""

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, future=1, sinks=0, epsilon=0)
    if self.statistics:
      _ = self._stored

  @property
  def traits(self) -> Traits:
    """It moves queries and reads those of a whole prompt."""
    return Traits(
      whole_prompts_only="it looks ahead from the end of a whole prompt",
      weighs=not self.value_norm,
      sinks=self.sinks,
      queries=0 if self.statistics else None,
      activations=frozenset({"rerotate"}),
    )

  def check_model(self, geometry: Geometry) -> None:
    """Refuses a model with other heads than the statistics.

    Raises:
      InputError: they differ.
    """
    if self.statistics:
      self._stored.check(geometry, "query_mean", per_query_head=True)
      self._stored.check(geometry, "query_cov", per_query_head=True)

  def load(self) -> PyTree:
    """Returns the statistics, if a file is named."""
    return dict(self._stored.arrays) if self.statistics else None

  def without_files(self) -> Self:
    """Names no file."""
    return dataclasses.replace(self, statistics="")

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes the expected attention; that of sinks is 0."""
    kv_heads = cache.keys.shape[1]
    counted = cache.valid & (cache.positions >= self.sinks)
    keys = cache.float_keys
    mean, covariance = self._queries(layer, activations)
    rotation = self._rotation(cache, activations)
    scale = activations.attention.scale_of(keys.shape[-1])
    mean = by_kv_head(mean @ rotation, kv_heads)
    logits = scale * jnp.einsum("bktd,bkgd->bkgt", keys, mean)
    if covariance is not None:
      turned = rotation[:, None]
      covariance = jnp.swapaxes(turned, -1, -2) @ covariance @ turned
      spread = _quadratic(keys, by_kv_head(covariance, kv_heads))
      logits += scale**2 / 2 * spread
    sinks = activations.sinks
    if sinks is not None:
      sinks = by_kv_head(sinks.astype(jnp.float32)[None], kv_heads)[..., None]
    weights = softmax(logits, counted[:, :, None], sinks)
    scores = jnp.mean(weights, axis=2)
    if self.value_norm:
      scores = (scores + self.epsilon) * value_norms(cache)
    return jnp.where(counted, scores, 0.0)

  @property
  def _stored(self) -> Stored:
    return Stored.read(self.statistics, {"query_mean": 3, "query_cov": 4})

  def _queries(
    self, layer: Int[Array, ""], activations: Activations
  ) -> tuple[Float[Array, "#B N D"], Float[Array, "#B N D D"] | None]:
    """Mean and covariance of the queries at position 0."""
    weights = self.weights_of(activations)
    if weights is not None:
      mean, covariance = (
        weights[name][layer][None] for name in ("query_mean", "query_cov")
      )
      return mean, covariance if self.covariance else None
    queries, counted = queries_at_zero(activations, self.sinks)
    return moments(queries, counted, covariance=self.covariance)

  def _rotation(
    self, cache: LayerCache, activations: Activations
  ) -> Float[Array, "B D D"]:
    """R^T of each row: the rows are the images of the unit vectors."""
    dim = cache.keys.shape[-1]
    rerotate = activations.rerotate
    assert rerotate is not None
    ahead = jnp.arange(self.future, dtype=jnp.int32)[None, :, None]
    shape = (1, self.future, dim)
    units = jnp.broadcast_to(jnp.eye(dim, dtype=jnp.float32), (*shape, dim))
    mean = jnp.mean(rerotate(units, jnp.broadcast_to(ahead, shape)), axis=1)
    # Rotations by n and by j make one by n + j, so that all rows share the
    # mean over j, and a float32 angle is precise.
    lengths = jnp.max(cache.positions, axis=(1, 2)) + 1
    batch = len(lengths)
    start = jnp.broadcast_to(lengths[:, None, None], (batch, 1, dim))
    mean = jnp.broadcast_to(mean[:, None], (batch, 1, dim, dim))
    return rerotate(mean, start)[:, 0]


def queries_at_zero(
  activations: Activations, first: int | Int[Array, ""] = 0
) -> tuple[Float[Array, "B N S D"], Bool[Array, "B 1 S 1"]]:
  """Moves queries from their positions to position 0, in float32.

  A scale that is part of the rotation, such as that of YaRN, is kept.

  Args:
    activations: the activations, with `rerotate`.
    first: position of the first queries that count; the others become zero.

  Returns:
    The queries, and which of them count.
  """
  positions = activations.positions[:, None]
  counted = (positions >= first)[..., None]
  queries = activations.queries.astype(jnp.float32)
  queries = jnp.where(counted, queries, 0.0)
  assert activations.rerotate is not None
  back = jnp.broadcast_to(-positions, queries.shape[:3])
  return activations.rerotate(queries, back), counted


def moments(
  queries: Float[Array, "B N S D"],
  counted: Bool[Array, "B 1 S 1"],
  *,
  covariance: bool,
) -> tuple[Float[Array, "B N D"], Float[Array, "B N D D"] | None]:
  """Computes the mean and the covariance (over the count) of some queries."""
  count = jnp.sum(counted.astype(jnp.float32), axis=2, keepdims=True)
  count = jnp.maximum(count, 1.0)
  mean = jnp.sum(queries, axis=2, keepdims=True, where=counted) / count
  if not covariance:
    return mean[:, :, 0], None
  centered = jnp.where(counted, queries - mean, 0.0)
  products = jnp.einsum("bnsi,bnsj->bnij", centered, centered)
  return mean[:, :, 0], products / count


def _quadratic(
  keys: Float[Array, "B K T D"], matrices: Float[Array, "B K G D D"]
) -> Float[Array, "B K G T"]:
  """Computes k.M k of every key, one query head of a group at a time."""

  def of_head(matrix: Float[Array, "B K D D"]) -> Float[Array, "B K T"]:
    return jnp.sum((keys @ matrix) * keys, axis=-1)

  by_head = jax.lax.map(of_head, jnp.moveaxis(matrices, 2, 0))
  return jnp.moveaxis(by_head, 0, 2)
