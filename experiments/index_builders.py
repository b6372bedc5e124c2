"""Indexes of one KV head's keys: CTkvr's, clusters, and those of faiss."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.errors import InputError
from kvjax.methods.heads import Head
from kvjax.retrieval import (
  ClusterKV,
  CTkvr,
  Flat,
  KeyBudget,
  Prompt,
  Retrieval,
  Store,
)
from kvjax.retrieval.clusters import Clusters
from kvjax.struct import struct

KEY_CENTRES = 64
QUERY_CENTRES = 16
# Of what surrounds a center over that of the centers: two queries of the same
# center have a cosine of 1 / (1 + 0.5^2) = 0.8.
SPREAD = 0.5
ASKING = 8

QCIVF = "qcIVF"


@struct
class Workload:
  """One KV head of a prompt, and tokens that look up keys of it.

  Attributes:
    prompt: with axes of size 1 for the row and the KV head.
    reads: keys that a token looks up, likewise.
    asking: queries of the tokens behind the prompt. The prompt's own last
      queries are CTkvr's centroids and would find themselves.
  """

  prompt: Prompt
  reads: KeyBudget
  asking: Float[Array, "J G D"]

  @property
  def store(self) -> Store:
    """The keys that may be looked up."""
    return Store(self.prompt.stored_keys[0, 0], self.prompt.stored[0, 0])


@dataclasses.dataclass(frozen=True)
class Builder:
  """A kind of index of a workload.

  Attributes:
    name: what tables call it.
    build: makes the index and returns when it is there.
    candidates: slots that an index names to each asking token, -1 for none.
  """

  name: str
  build: Callable[[], Any]
  candidates: Callable[[Any], Int[Array, "J X"]]


def load_faiss() -> types.ModuleType:
  """The module.

  Raises:
    InputError: it is not installed.
  """
  try:
    import faiss
  except ImportError as error:
    raise InputError(
      "faiss, which builds the other indexes, is not installed: "
      "`pip install faiss-cpu` installs it."
    ) from error
  return faiss


def draw(
  retrieval: CTkvr, seed: int, length: int, group: int, head_dim: int
) -> Workload:
  """Random keys and queries: Gaussians around Gaussian centers.

  A token's key belongs to one of `KEY_CENTRES`, its queries to one of
  `QUERY_CENTRES`, the same one for all heads, each with its own center there.

  Args:
    retrieval: says what is resident and how many keys are read.
    seed: of the draws.
    length: tokens of the prompt.
    group: query heads.
    head_dim: D.
  """
  rng = np.random.default_rng(seed)
  topics = rng.integers(KEY_CENTRES, size=length)
  keys = jnp.asarray(_around(rng, KEY_CENTRES, topics, head_dim))[None, None]
  topics = rng.integers(QUERY_CENTRES, size=length + ASKING)
  queries = jnp.asarray(
    np.stack(
      [_around(rng, QUERY_CENTRES, topics, head_dim) for _ in range(group)]
    )
  )
  positions = jnp.arange(length, dtype=jnp.int32)[None, None]
  start, end = retrieval.sinks, length - retrieval.local
  head = Head(
    cached_keys=keys,
    cached_values=keys,
    positions=positions,
    queries=queries[None, None, :, :length],
    query_positions=positions,
  )
  lookup = (positions >= start) & (positions < end)
  number = jnp.zeros((1, 1), jnp.int32)
  count = jnp.full((1, 1), retrieval.reads, jnp.int32)
  return Workload(
    Prompt(head, lookup, number, 0, start, end),
    KeyBudget(count, retrieval.reads),
    jnp.swapaxes(queries[:, length:], 0, 1),
  )


def builders(
  faiss: types.ModuleType, retrieval: CTkvr, workload: Workload
) -> list[Builder]:
  """qcIVF, then the others; compiled where there is something to compile.

  Where CTkvr recalls some lists for a group of heads, each head looks at its
  part of so many keys with the others: IVF probes the lists that hold them on
  average, HNSW remembers so many while it searches, and of clusters those of
  the highest product of query and centroid are read until there are so many.
  """
  keys = np.asarray(workload.store.keys)
  group = workload.asking.shape[1]
  recalled = retrieval.probes * int(retrieval.list_ratio * retrieval.reads)
  part = min(max(recalled // group, 1), len(keys))
  lists = jax.eval_shape(
    functools.partial(_index, retrieval), workload.prompt, workload.reads
  )
  centroids = lists.slots.shape[-2]
  clusterkv = ClusterKV(clusters=centroids)
  looked_up = functools.partial(_looked_up, workload)
  searched = functools.partial(_searched, workload)

  def first(index: PyTree[Array]) -> PyTree[Array]:
    return jax.tree.map(lambda x: x[0, 0], index)

  return [
    Builder(
      QCIVF,
      _compiled(retrieval, workload),
      lambda index: looked_up(retrieval, first(index), retrieval.reads),
    ),
    Builder("IVF", lambda: _ivf(faiss, keys, part), searched),
    Builder("HNSW", lambda: _hnsw(faiss, keys, part), searched),
    Builder(
      "K-means",
      lambda: _kmeans(faiss, keys, centroids),
      lambda index: looked_up(clusterkv, index, part),
    ),
    Builder(
      "K-means of kvjax",
      _compiled(clusterkv, workload),
      lambda index: looked_up(clusterkv, first(index), part),
    ),
  ]


@jax.jit
def recall(
  workload: Workload, candidates: Int[Array, "J X"]
) -> Float[Array, ""]:
  """Share of the keys that exact search reads which are read.

  What an index names is ranked as CTkvr ranks what it recalls, by the most
  that any head of the group attends to a key, and the best are read. Mean over
  the asking tokens.
  """
  store = workload.store
  size = store.valid.shape[0]
  reads = KeyBudget(workload.reads.num_keys[0, 0], workload.reads.max_keys)

  def of_token(
    queries: Float[Array, "G D"], slots: Int[Array, " X"]
  ) -> Float[Array, ""]:
    place = jnp.where(slots >= 0, slots, size)
    named = jnp.zeros(size + 1, bool).at[place].set(True)[:size]
    known = Store(store.keys, store.valid & named)
    exact, _ = Flat().retrieve(None, queries, store, reads)
    found, _ = Flat().retrieve(None, queries, known, reads)
    hits = jnp.isin(exact.slots, found.slots)
    return jnp.mean(hits.astype(jnp.float32))

  return jnp.mean(jax.vmap(of_token)(workload.asking, candidates))


def _around(
  rng: np.random.Generator,
  centers: int,
  topics: Int[np.ndarray, " T"],
  head_dim: int,
) -> Float[np.ndarray, "T D"]:
  """Vectors around random centers, to which the topics assign them."""
  means = rng.standard_normal((centers, head_dim), np.float32)
  noise = rng.standard_normal((len(topics), head_dim), np.float32)
  return means[topics] + np.float32(SPREAD) * noise


def _index(
  retrieval: Retrieval, prompt: Prompt, reads: KeyBudget
) -> PyTree[Array]:
  """As layers do it, over rows and KV heads."""
  with jax.default_matmul_precision("highest"):
    return jax.vmap(jax.vmap(retrieval.index))(prompt, reads)


def _compiled(
  retrieval: Retrieval, workload: Workload
) -> Callable[[], PyTree[Array]]:
  prompt, reads = workload.prompt, workload.reads
  build = jax.jit(_index, static_argnums=0).lower(retrieval, prompt, reads)
  run = build.compile()
  return lambda: jax.block_until_ready(run(prompt, reads))


def _ivf(
  faiss: types.ModuleType, keys: Float[np.ndarray, "F D"], part: int
) -> Any:
  count, head_dim = len(keys), keys.shape[1]
  lists = round(4 * count**0.5)
  quantizer = faiss.IndexFlatIP(head_dim)
  index = faiss.IndexIVFFlat(
    quantizer, head_dim, lists, faiss.METRIC_INNER_PRODUCT
  )
  index.cp.min_points_per_centroid = 1  # or it warns that keys are few
  index.train(keys)
  index.add(keys)
  index.nprobe = max(1, round(part * lists / count))
  return index


def _hnsw(
  faiss: types.ModuleType, keys: Float[np.ndarray, "F D"], part: int
) -> Any:
  index = faiss.IndexHNSWFlat(keys.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
  index.add(keys)
  index.hnsw.efSearch = part
  return index


def _kmeans(
  faiss: types.ModuleType, keys: Float[np.ndarray, "F D"], count: int
) -> Clusters:
  kmeans = faiss.Kmeans(keys.shape[1], count, min_points_per_centroid=1)
  kmeans.train(keys)
  _, cluster = kmeans.assign(keys)
  return Clusters(
    jnp.asarray(kmeans.centroids),
    jnp.asarray(np.bincount(cluster, minlength=count), jnp.int32),
    jnp.asarray(np.argsort(cluster), jnp.int32),
  )


@functools.partial(jax.jit, static_argnums=(1, 3))
def _looked_up(
  workload: Workload, retrieval: Retrieval, index: PyTree[Array], most: int
) -> Int[Array, "J X"]:
  """What a retrieval method finds for each asking token, `most` per list."""
  reads = KeyBudget(jnp.asarray(most, jnp.int32), most)
  found, _ = jax.vmap(retrieval.retrieve, (None, 0, None, None))(
    index, workload.asking, workload.store, reads
  )
  return found.slots.reshape(len(workload.asking), -1)


def _searched(workload: Workload, index: Any) -> Int[Array, "J X"]:
  """What an index of faiss finds for all heads of each asking token."""
  tokens, group, head_dim = workload.asking.shape
  queries = np.asarray(workload.asking).reshape(tokens * group, head_dim)
  _, slots = index.search(queries, workload.reads.max_keys)
  return jnp.asarray(slots.reshape(tokens, -1), jnp.int32)
