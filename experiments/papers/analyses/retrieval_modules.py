"""E4.5: how long each part of a retrieval takes, in a step of decoding."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

import kvjax
from kvjax.activations import Activations
from kvjax.cache.index import LayerIndex
from kvjax.cache.layers import attend_partially
from kvjax.cache.ranked import attend_to_best
from kvjax.cache.retrieve import attend_to_selection, broadcast_budget
from kvjax.cache.rows import Rows
from kvjax.cache.sparse import SparseLayer
from kvjax.experiments.papers.analyses import scorer_timing
from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report import wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run.progress_bar import track
from kvjax.heads import by_kv_head
from kvjax.kernels.attention.options import PLAIN
from kvjax.retrieval.base import Candidates, KeyBudget, Retrieval, Store

# Keys that are read, for prompts of the paper's length and a sixteenth of it.
_READ = {"paper": 512, "small": 32}
_ROUNDS = 21

_RECALL = "recall"
_RERANK = "rerank"
_RETRIEVED = "attention to retrieved keys"
_ON_HOST = "rerank and attention to retrieved keys, by the host"
_RESIDENT = "attention to resident keys"
_UPDATE = "centroid update"
_STEP = "all of these, compiled together"
_MODULES = (_RECALL, _RERANK, _RETRIEVED, _ON_HOST, _RESIDENT, _UPDATE, _STEP)

Modules = dict[str, Callable[[], PyTree[Array]]]


class Token(NamedTuple):
  """A decoded token in a layer.

  Attributes:
    layer: the layer; an index, a store and rows are parts of it.
    queries: its queries.
    activations: its queries again, with its position.
  """

  layer: SparseLayer
  queries: Float[Array, "B N D"]
  activations: Activations

  @property
  def grouped(self) -> Float[Array, "B K G D"]:
    """Queries by KV head."""
    kv_heads = self.layer.stored.positions.shape[1]
    return by_kv_head(self.queries, kv_heads).astype(jnp.float32)

  @property
  def real(self) -> Bool[Array, "B K"]:
    """True: no padding."""
    return jnp.ones(self.layer.stored.positions.shape[:2], bool)

  @property
  def store(self) -> Store:
    """The stored tokens."""
    return Store(None, self.layer.stored.valid)

  @property
  def rows(self) -> Rows:
    """The stored keys and values."""
    return Rows(self.layer.stored.keys, self.layer.stored.values)

  @property
  def budget(self) -> KeyBudget:
    """How many keys each KV head reads."""
    kv_heads = self.layer.stored.positions.shape[1]
    return broadcast_budget(self.layer.count, kv_heads, self.layer.most)


def measure(subject: Subject) -> Findings:
  """Measures milliseconds per module and step, on the device and offloaded."""
  reads = kvjax.Tokens(_READ[subject.scale])
  (length,) = subject.lengths
  cache, _ = kvjax.prefill(
    subject.lm.model,
    subject.lm.params,
    subject.random_prose(1, length),
    kvjax.get_plan("ctkvr", reads),
  )
  layer, layers = _sparse_layer(cache)
  del cache
  columns = []
  for modules_of in (on_device, offloaded):
    modules = modules_of(token_of(layer))
    columns.append(
      {
        name: scorer_timing.median_seconds(run, _ROUNDS)
        for name, run in track([*modules.items()])
      }
    )
    del modules  # Their arrays would be next to those of the other column.
  lines = [
    [name, *(_milliseconds(column.get(name), layers) for column in columns)]
    for name in _MODULES
  ]
  title = (
    f"one prompt of {length:,} tokens, {reads} retrieved, {layers} layers: "
    "milliseconds of a step"
  )
  return Findings(
    [Table(title, ["module", "on the device", "offloaded"], lines)],
    [
      "Modules are compiled and timed apart in one layer, and multiplied by "
      "the number of layers. The queries are the newest centroid's. Without "
      "host memory, offloaded keys are on the device as well."
    ],
  )


def _milliseconds(seconds: float | None, layers: int) -> str:
  if seconds is None:
    return wording.NOTHING
  return f"{1000 * layers * seconds:,.2f}"


def _sparse_layer(cache: kvjax.Cache) -> tuple[SparseLayer, int]:
  """Returns the first layer that retrieves, and how many do."""
  for number, stack in enumerate(cache.stacks):
    if isinstance(stack, SparseLayer):
      return stack.at(0), cache.order.count(number)
  raise kvjax.InputError(
    "Every layer reads all of this prompt; give a longer --length."
  )


def token_of(layer: SparseLayer) -> Token:
  """Makes a token whose queries are the newest centroid of each head."""
  newest = jnp.max(layer.index.size) - 1
  queries = layer.index.centroids[:, :, :, newest]
  batch, kv_heads, group, dim = queries.shape
  queries = queries.reshape(batch, kv_heads * group, dim)
  nothing = jnp.zeros((batch, kv_heads, 1, dim), queries.dtype)
  positions = jnp.max(layer.lengths, axis=1)[:, None]
  return Token(
    layer,
    queries,
    Activations(queries[:, :, None], nothing, nothing, positions),
  )


def on_device(token: Token) -> Modules:
  """Returns what to time if all keys are on the device."""
  retrieval = token.layer.retrieval

  def rerank(token: Token, slots: Int[Array, "B K U"]) -> Any:
    candidates = Candidates(slots, token.rows.logits(slots, token.grouped))
    store = dataclasses.replace(token.store, candidates=candidates)
    return jax.vmap(jax.vmap(retrieval.retrieve))(
      token.layer.index, token.grouped, store, token.budget
    )

  recall = jax.jit(_recall(retrieval))
  rerank = jax.jit(rerank)
  attend = jax.jit(
    lambda token, selection: attend_to_selection(
      token.queries, token.rows, selection, PLAIN
    )
  )
  candidates = recall(token)
  selection, update = rerank(token, candidates)
  return {
    _RECALL: lambda: recall(token),
    _RERANK: lambda: rerank(token, candidates),
    _RETRIEVED: lambda: attend(token, selection),
    **_common(token, update, selection.slots),
  }


def offloaded(token: Token) -> Modules:
  """Returns what to time if stored keys are on the host."""
  retrieval = dataclasses.replace(token.layer.retrieval, offload=True)
  layer = dataclasses.replace(token.layer, retrieval=retrieval).offload()
  token = token._replace(layer=layer)

  def rank(token: Token, candidates: Int[Array, "B K U"]) -> Any:
    ranking = jax.vmap(jax.vmap(retrieval.ranking))(
      token.layer.index, token.budget
    )
    assert ranking is not None
    return attend_to_best(ranking, token.queries, candidates, token.rows, PLAIN)

  recall, rank = jax.jit(_recall(retrieval)), jax.jit(rank)
  candidates = recall(token)
  _, listed = rank(token, candidates)
  update = jax.vmap(jax.vmap(retrieval.update_of))(
    token.layer.index, token.grouped, listed
  )
  return {
    _RECALL: lambda: recall(token),
    _ON_HOST: lambda: rank(token, candidates),
    **_common(token, update, candidates[:, :, None]),
  }


def _recall(retrieval: Retrieval) -> Callable[[Token], Int[Array, "B K U"]]:
  def recall(token: Token) -> Int[Array, "B K U"]:
    return jax.vmap(jax.vmap(retrieval.candidates))(
      token.layer.index, token.grouped, token.store
    )

  return recall


def _common(
  token: Token, update: PyTree[Array], read: Int[Array, "B K J M"]
) -> Modules:
  """What differs only in where the stored keys are."""
  retrieval = token.layer.retrieval
  resident = jax.jit(
    lambda token: attend_partially(token.layer.resident, token.activations)
  )

  def write(
    index: PyTree[Array], update: PyTree[Array], read: Int[Array, "B K J M"]
  ) -> PyTree[Array]:
    changes = jax.vmap(jax.vmap(retrieval.update_index))(
      index, update, token.real
    )
    return LayerIndex(index).write(changes, read).arrays

  def step(index: PyTree[Array], token: Token) -> PyTree[Array]:
    layer = dataclasses.replace(token.layer, index=index)
    output, layer = layer.attend(token.activations)
    return layer.index, output

  # Donated, since decoding changes the index in place.
  write, step = (jax.jit(each, donate_argnums=0) for each in (write, step))
  indexes = [jax.tree.map(jnp.copy, token.layer.index) for _ in range(2)]

  def write_again() -> PyTree[Array]:
    indexes[0] = write(indexes[0], update, read)
    return indexes[0]

  def step_again() -> PyTree[Array]:
    indexes[1], output = step(indexes[1], token)
    return output

  return {
    _RESIDENT: lambda: resident(token),
    _UPDATE: write_again,
    _STEP: step_again,
  }
