"""E1.8: latency of ProtoKV's stages by number of prototypes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax import clustering as proto
from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.experiments.papers.analyses.scorer_timing import (
  Scorer,
  scorer_of,
  seconds_of,
)
from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run.progress_bar import track
from kvjax.methods.ranking import rank_clusters, score_clusters
from kvjax.testing import random_activations

_PROTOTYPES = (100, 250, 500, 1000)
# One KV head of Llama-3-8B.
_GROUP, _DIM = 4, 128


def measure(subject: Subject) -> Findings:
  """Measures milliseconds of each stage and of full scorers, for a KV head."""
  (length,) = subject.lengths
  activations = random_activations(
    subject.seed, [length], length, heads=_GROUP, kv_heads=1, head_dim=_DIM
  )
  cache = LayerCache.of(activations)

  def milliseconds(scorer: Scorer) -> str:
    return f"{1000 * seconds_of(scorer, cache, activations):,.1f}"

  columns = [
    _stages(activations, count)
    | {"ProtoKV": scorer_of(kvjax.get_method(f"protokv:prototypes={count}"))}
    for count in _PROTOTYPES
  ]
  lines = [
    [name, *(milliseconds(scorers[name]) for scorers in columns)]
    for name in track(list(columns[0]))
  ]
  snapkv = milliseconds(scorer_of(kvjax.get_method("snapkv.factory")))
  lines.append(["SnapKV", *[snapkv] * len(_PROTOTYPES)])
  header = ["ms of a KV head", *(f"P_tot = {count}" for count in _PROTOTYPES)]
  title = f"{length:,} tokens, {_GROUP} query heads, D = {_DIM}"
  return Findings(
    [Table(title, header, lines)],
    [
      "Stages are compiled and timed apart; together they share work, so that "
      "their sum is not ProtoKV's time."
    ],
  )


_Centers = tuple[Float[Array, "P D"], Bool[Array, " P"]]


def _stages(activations: Activations, count: int) -> dict[str, Scorer]:
  """Returns the stages of scoring a head, each with precomputed inputs."""
  keys = activations.keys[0, 0]
  length = len(keys)
  prefix = jnp.arange(length) < length - 8
  rng = jax.random.key(0)
  slots = jnp.arange(32, dtype=jnp.int32)
  centers, cluster = jax.jit(_clusters, static_argnums=2)(keys, prefix, count)
  products = keys @ keys[-1]
  valid = jnp.ones(len(slots), bool)

  def keys_of(cache: LayerCache) -> Array:
    return cache.keys[0, 0]

  return {
    "deviation": lambda cache, _: proto.deviation(
      keys_of(cache), prefix, 5, True
    ),
    "hashing of anchors": lambda cache, _: proto.buckets(
      keys_of(cache), slots, valid, rng, 2, "fourier", "median"
    ),
    "chunks and prototypes": lambda cache, _: _centers(
      keys_of(cache), prefix, count
    ),
    "assignment": lambda cache, _: proto.nearest(keys_of(cache), *centers),
    "worth and order": lambda cache, _: rank_clusters(
      cluster,
      score_clusters(
        products + keys_of(cache)[:, 0], cluster, prefix, count, False
      ),
      prefix,
      products,
    ),
    "K-means, 10 iterations": lambda cache, _: proto.kmeans(
      keys_of(cache), prefix, rng, count, 10
    ),
  }


def _centers(
  keys: Float[Array, "T D"], prefix: Bool[Array, " T"], count: int
) -> _Centers:
  """Computes the prototypes of chunks, all but four."""
  chunk = proto.chunks(prefix, jnp.asarray(count - 4), "balanced")
  return proto.prototypes(keys, chunk, count)


def _clusters(
  keys: Float[Array, "T D"], prefix: Bool[Array, " T"], count: int
) -> tuple[_Centers, Int[Array, " T"]]:
  """Computes prototypes and the nearest one of every key."""
  centers = _centers(keys, prefix, count)
  return centers, proto.nearest(keys, *centers)
