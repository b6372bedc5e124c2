"""Builds indexes of a KV head's keys: CTkvr's, clusters, and faiss's."""

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
from kvjax.heads import Head
from kvjax.retrieval import (
  ClusterKV,
  CTkvr,
  Flat,
  KeyBudget,
  Prompt,
  Retrieval,
  Store,
)
from kvjax.retrieval.base import Candidates
from kvjax.retrieval.clusters import Clusters
from kvjax.retrieval.weights import scaled_logits
from kvjax.struct import replace, struct

KEY_CENTERS = 64
QUERY_CENTERS = 16
# Standard deviation around a center, relative to that of the centers. Two
# queries of one center have a cosine of 1 / (1 + 0.5^2) = 0.8.
SPREAD = 0.5
TOKENS = 8

QCIVF = "qcIVF"


@struct
class Workload:
  """One KV head of a prompt, and tokens that retrieve its keys.

  Attributes:
    prompt: the prompt, with axes of size 1 for row and KV head.
    key_budget: number of keys that a token retrieves, likewise.
    queries: queries of the tokens after the prompt. The prompt's last queries
      are CTkvr's centroids, so they would match themselves.
  """

  prompt: Prompt
  key_budget: KeyBudget
  queries: Float[Array, "J G D"]

  @property
  def store(self) -> Store:
    """The keys that may be retrieved."""
    return Store(self.prompt.stored_keys[0, 0], self.prompt.stored[0, 0])


@dataclasses.dataclass(frozen=True)
class Builder:
  """A kind of index of a workload.

  Attributes:
    name: name in tables.
    build: builds the index and waits for it.
    candidates: slots that an index retrieves for each token, -1 for none.
  """

  name: str
  build: Callable[[], Any]
  candidates: Callable[[Any], Int[Array, "J X"]]


def load_faiss() -> types.ModuleType:
  """Imports faiss.

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
  """Draws keys and queries as Gaussians around Gaussian centers.

  A token's key belongs to one of `KEY_CENTERS` clusters, its queries to one of
  `QUERY_CENTERS`, the same one for all heads but with a center per head.

  Args:
    retrieval: defines the resident tokens and the number of keys to read.
    seed: random seed.
    length: tokens of the prompt.
    group: query heads.
    head_dim: D.
  """
  rng = np.random.default_rng(seed)
  topics = rng.integers(KEY_CENTERS, size=length)
  keys = jnp.asarray(around(rng, KEY_CENTERS, topics, head_dim))[None, None]
  topics = rng.integers(QUERY_CENTERS, size=length + TOKENS)
  queries = jnp.asarray(
    np.stack(
      [around(rng, QUERY_CENTERS, topics, head_dim) for _ in range(group)]
    )
  )
  positions = jnp.arange(length, dtype=jnp.int32)[None, None]
  start, end = retrieval.sinks, length - retrieval.local
  held = retrieval.num_queries(length)
  first = 0 if held is None else length - held
  head = Head(
    cached_keys=keys,
    cached_values=keys,
    positions=positions,
    queries=queries[None, None, :, first:length],
    query_positions=positions[..., first:],
  )
  lookup = (positions >= start) & (positions < end)
  number = jnp.zeros((1, 1), jnp.int32)
  count = jnp.full((1, 1), retrieval.keys, jnp.int32)
  return Workload(
    Prompt(head, lookup, number, number, start, end),
    KeyBudget(count, retrieval.keys),
    jnp.swapaxes(queries[:, length:], 0, 1),
  )


def around(
  rng: np.random.Generator,
  centers: int,
  topics: Int[np.ndarray, " T"],
  head_dim: int,
) -> Float[np.ndarray, "T D"]:
  """Draws vectors around random centers; topics assign the centers."""
  means = rng.standard_normal((centers, head_dim), np.float32)
  noise = rng.standard_normal((len(topics), head_dim), np.float32)
  return means[topics] + np.float32(SPREAD) * noise


def builders(
  faiss: types.ModuleType, retrieval: CTkvr, workload: Workload
) -> list[Builder]:
  """Lists qcIVF and the other builders, with JAX programs compiled.

  All indexes examine about the same number of keys. CTkvr recalls some lists
  for a group of heads; with the other indexes, each head examines its part of
  as many keys. IVF probes the number of lists that contain this many on
  average, HNSW searches with this many candidates, and clusters are read in the
  order of their centroid's product with the query.
  """
  keys = np.asarray(workload.store.keys)
  group = workload.queries.shape[1]
  recalled = retrieval.probes * int(retrieval.list_ratio * retrieval.keys)
  part = min(max(recalled // group, 1), len(keys))
  lists = jax.eval_shape(
    functools.partial(_index, retrieval), workload.prompt, workload.key_budget
  )
  centroids = lists.slots.shape[-2]
  clusterkv = ClusterKV(clusters=centroids)
  retrieve = functools.partial(_retrieve, workload)
  search = functools.partial(_search, workload)

  def first(index: PyTree[Array]) -> PyTree[Array]:
    return jax.tree.map(lambda x: x[0, 0], index)

  return [
    Builder(
      QCIVF,
      _compiled(retrieval, workload),
      lambda index: retrieve(retrieval, first(index), retrieval.keys),
    ),
    Builder("IVF", lambda: _ivf(faiss, keys, part), search),
    Builder("HNSW", lambda: _hnsw(faiss, keys, part), search),
    Builder(
      "K-means",
      lambda: _kmeans(faiss, keys, centroids),
      lambda index: retrieve(clusterkv, index, part),
    ),
    Builder(
      "K-means of kvjax",
      _compiled(clusterkv, workload),
      lambda index: retrieve(clusterkv, first(index), part),
    ),
  ]


@jax.jit
def recall(
  workload: Workload, candidates: Int[Array, "J X"]
) -> Float[Array, ""]:
  """Computes the share of the keys of exact search that an index retrieves.

  The candidates of an index are ranked as in CTkvr, by the maximum attention of
  the group's heads to a key, and the best are read. The result is the mean over
  the tokens.
  """
  store = workload.store
  size = store.valid.shape[0]
  key_budget = KeyBudget(
    workload.key_budget.num_keys[0, 0], workload.key_budget.max_keys
  )

  def of_token(
    queries: Float[Array, "G D"], slots: Int[Array, " X"]
  ) -> Float[Array, ""]:
    place = jnp.where(slots >= 0, slots, size)
    is_candidate = jnp.zeros(size + 1, bool).at[place].set(True)[:size]
    known = Store(store.keys, store.valid & is_candidate)
    exact, _ = Flat().retrieve(None, queries, store, key_budget)
    retrieved, _ = Flat().retrieve(None, queries, known, key_budget)
    hits = jnp.isin(exact.slots, retrieved.slots)
    return jnp.mean(hits.astype(jnp.float32))

  return jnp.mean(jax.vmap(of_token)(workload.queries, candidates))


def _index(
  retrieval: Retrieval, prompt: Prompt, key_budget: KeyBudget
) -> PyTree[Array]:
  """Builds an index over rows and KV heads, like a cache layer."""
  with jax.default_matmul_precision("highest"):
    return jax.vmap(jax.vmap(retrieval.index))(prompt, key_budget)


def _compiled(
  retrieval: Retrieval, workload: Workload
) -> Callable[[], PyTree[Array]]:
  prompt, key_budget = workload.prompt, workload.key_budget
  build = jax.jit(_index, static_argnums=0).lower(retrieval, prompt, key_budget)
  run = build.compile()
  return lambda: jax.block_until_ready(run(prompt, key_budget))


def _ivf(
  faiss: types.ModuleType, keys: Float[np.ndarray, "F D"], part: int
) -> Any:
  count, head_dim = len(keys), keys.shape[1]
  lists = round(4 * count**0.5)
  quantizer = faiss.IndexFlatIP(head_dim)
  index = faiss.IndexIVFFlat(
    quantizer, head_dim, lists, faiss.METRIC_INNER_PRODUCT
  )
  index.cp.min_points_per_centroid = 1  # otherwise it warns about few keys
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
def _retrieve(
  workload: Workload, retrieval: Retrieval, index: PyTree[Array], most: int
) -> Int[Array, "J X"]:
  """Retrieves keys by a retrieval method for each token, `most` per list."""
  key_budget = KeyBudget(jnp.asarray(most, jnp.int32), most)

  def of_token(queries: Float[Array, "G D"]) -> Int[Array, "H R"]:
    store = workload.store
    if retrieval.key_access == "candidates":
      assert store.keys is not None
      slots = retrieval.candidates(index, queries, store)
      logits = scaled_logits(queries, store.keys[jnp.maximum(slots, 0)])
      logits = jnp.where(slots >= 0, logits, -jnp.inf)
      store = replace(store, candidates=Candidates(slots, logits))
    return retrieval.retrieve(index, queries, store, key_budget)[0].slots

  return jax.vmap(of_token)(workload.queries).reshape(len(workload.queries), -1)


def _search(workload: Workload, index: Any) -> Int[Array, "J X"]:
  """Retrieves keys by a faiss index for all heads of each token."""
  tokens, group, head_dim = workload.queries.shape
  queries = np.asarray(workload.queries).reshape(tokens * group, head_dim)
  _, slots = index.search(queries, workload.key_budget.max_keys)
  return jnp.asarray(slots.reshape(tokens, -1), jnp.int32)
