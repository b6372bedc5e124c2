"""A layer's cache that keeps everything and reads what a method looks up."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.base import Arrange, Index, Layer
from kvjax.cache.heads import heads_of
from kvjax.cache.layers import LayerCache
from kvjax.cache.ring import Ring
from kvjax.cache.rows import Rows
from kvjax.cache.splitting import split_tokens
from kvjax.errors import InputError
from kvjax.kernels.attention import (
  AttentionOptions,
  Partial,
  merge,
  partial_attention,
  with_sinks,
)
from kvjax.kernels.select import named_slots, true_slots
from kvjax.kernels.sparse_decode import sparse_decode
from kvjax.placement import to_host
from kvjax.retrieval.base import (
  Candidates,
  Found,
  Prompt,
  Reads,
  Retrieval,
  Store,
  Waiting,
)
from kvjax.struct import static, struct, updated


@struct
class SparseLayer(Layer):
  """The tokens that all others attend to, and those that are looked up.

  Attributes:
    resident: first and last tokens of the prompt, and what came after it. Where
      the method limits their number, `kvjax.cache.ring` says how they stand.
    stored: the tokens in between.
    index: what the method looks up with.
    count: keys to look up per token, of each row.
    looked_up: keys that the prompt's last token looks up: those that any of
      the heads which read a KV head reads.
    most: the largest count of the batch.
    retrieval: the method.
    spare: slots at the end of `stored` for tokens that cease to be resident.
  """

  resident: LayerCache
  stored: LayerCache
  index: PyTree[Array]
  count: Int[Array, " B"]
  looked_up: Int[Array, "B K"]
  most: int = static()
  retrieval: Retrieval = static()
  spare: int = static(default=0)

  @classmethod
  def of(
    cls,
    retrieval: Retrieval,
    layer: Int[Array, ""],
    cache: LayerCache,
    seen: Activations,
    count: Int[Array, " B"],
    most: int,
  ) -> Layer:
    """Indexes a layer, its prompt having just been prefilled.

    Args:
      retrieval: the method.
      layer: its number.
      cache: what is kept of the layer: the first slots of each head.
      seen: the prompt.
      count: keys to look up per token.
      most: of any row.

    Returns:
      The layer itself where so many keys are read that nothing is left out,
      now or later.
    """
    split = split_tokens(retrieval, cache, most)
    if split is None:
      return cache
    lengths = cache.lengths
    heads = jnp.arange(lengths.shape[1], dtype=jnp.int32)
    prompt = Prompt(
      heads_of(split.cache, _rescaled(seen)),
      split.lookup,
      jnp.broadcast_to(heads[None], lengths.shape),
      jnp.broadcast_to(layer, lengths.shape),
      split.start,
      split.end,
    )
    reads = _reads(count, lengths.shape[1], most)
    with jax.default_matmul_precision("highest"):
      index = jax.vmap(jax.vmap(retrieval.index))(prompt, reads)
    resident, stored = split.resident(retrieval), split.stored()
    none = jnp.zeros_like(lengths)
    indexed = cls(resident, stored, index, count, none, most, retrieval)
    looked_up = indexed._count_found(seen)
    return dataclasses.replace(indexed, looked_up=looked_up)

  @property
  def capacity(self) -> int:
    """Slots that new tokens can go to, filled or not."""
    return self.resident.capacity + self.spare

  @property
  def next_slot(self) -> Int[Array, "*L"]:
    """The next of them to write."""
    return self.resident.cursor

  @property
  def lengths(self) -> Int[Array, "*L B K"]:
    """Tokens held per row and KV head."""
    return self.resident.lengths + self.stored.lengths

  @property
  def reads(self) -> Int[Array, "*L B K"]:
    """Tokens that a token attends to, if it looks up as `looked_up` says."""
    return self.resident.lengths + self.looked_up

  def offloaded(self) -> "SparseLayer":
    """Those that are looked up on the host, if asked for and possible."""
    if not self.retrieval.offload:
      return self
    keys, values = to_host((self.stored.keys, self.stored.values))
    return updated(self, stored=updated(self.stored, keys=keys, values=values))

  def map_slots(self, change: Callable[[Any], Any]) -> "SparseLayer":
    """See `Layer.map_slots`."""
    return updated(
      self,
      resident=self.resident.map_slots(change),
      stored=self.stored.map_slots(change),
    )

  def row_positions(self, row: int) -> list[list[int]]:
    """See `Layer.row_positions`."""
    near, far = self.resident.row_positions(row), self.stored.row_positions(row)
    return [one + other for one, other in zip(near, far, strict=True)]

  def grown(self, extra: int) -> "SparseLayer":
    """The same tokens with room for `extra` more."""
    if not self.retrieval.ring:
      return updated(self, resident=self.resident.grown(extra))
    return updated(
      self, stored=self.stored.grown(extra), spare=self.spare + extra
    )

  def append(self, seen: Activations, index: Index = None) -> "SparseLayer":
    """Writes a block to the resident tokens; there must be room for it.

    Raises:
      InputError: the method keeps fewer tokens resident than the block has.
    """
    places = self.retrieval.ring
    if not places:
      return updated(self, resident=self.resident.append(seen, index))
    size = seen.positions.shape[1]
    if size > places:
      raise InputError(
        f"A turn of {size} tokens, padding included, does not fit into the "
        f"{places} places that are resident beside the sinks; raise "
        "max_resident."
      )
    kv_heads = self.resident.positions.shape[-2]
    block = LayerCache.of(seen.with_kv_heads(kv_heads))
    rest, rows = self._apart(index)
    layer = rest.at(index)
    ring, moved = layer._ring.after(block)
    rows = rows.write(moved.keys, moved.values, moved.start)
    after = updated(layer, resident=ring.resident, stored=ring.stored)
    return rest.put(index, layer, after)._joined(rows)

  def step(
    self,
    index: Index,
    activations: Activations,
    arrange: Arrange | None = None,
  ) -> tuple[Float[Array, "B N S Dv"], "SparseLayer"]:
    """See `Layer.step`; nothing is arranged, as nothing is evicted."""
    assert arrange is None
    rest, rows = self.append(activations, index)._apart(index)
    layer = rest.at(index)
    output, after = layer._attend(activations, rows)
    return output, rest.put(index, layer, after)._joined(rows)

  def _apart(self, index: Index) -> tuple["SparseLayer", Rows]:
    """Everything but the stored keys and values, and these."""
    stored = self.stored
    rest = updated(self, stored=updated(stored, keys=None, values=None))
    return rest, Rows(stored.keys, stored.values, index)

  def _joined(self, rows: Rows) -> "SparseLayer":
    """The inverse of `_apart`."""
    stored = updated(self.stored, keys=rows.keys, values=rows.values)
    return updated(self, stored=stored)

  @property
  def _ring(self) -> Ring:
    return Ring(self.resident, self.stored, self.retrieval.ring, self.spare)

  def attend(
    self, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], "SparseLayer"]:
    """Attention to the resident tokens and to what each query looks up."""
    rest, rows = self._apart(None)
    output, after = rest._attend(activations, rows)
    return output, after._joined(rows)

  def _attend(
    self, activations: Activations, rows: Rows
  ) -> tuple[Float[Array, "B N S Dv"], "SparseLayer"]:
    near = _attend(self.resident, activations)
    lone = activations.queries.shape[2] == 1
    if not lone and self.retrieval.turn == "dense":
      keys, values = rows.copy()
      stored = updated(self.stored, keys=keys, values=values)
      index, far = self.index, _attend(stored, activations)
    elif lone:
      index, far = self._look_up(activations, rows)
    else:
      index, far = self._look_up_each(activations, rows)
    found = merge(near, far)
    if activations.sinks is not None:
      found = with_sinks(found, activations.sinks)
    return found.output, updated(self, index=index)

  def _look_up(
    self, activations: Activations, rows: Rows
  ) -> tuple[PyTree[Array], Partial]:
    """The index after a token of each row, and what it looks up.

    There is no branch in it: while the host gathers, the device is free for the
    resident tokens.
    """
    index, far = self._attend_to_found(
      self.index,
      activations.queries[:, :, 0],
      activations.positions[:, 0],
      rows=rows,
      options=activations.attention,
    )
    return index, Partial(far.output[:, :, None], far.lse[:, :, None])

  def _look_up_each(
    self, activations: Activations, rows: Rows
  ) -> tuple[PyTree[Array], Partial]:
    """The same for several tokens, one after another."""
    queries = activations.queries
    width = rows.values.shape[-1]

    def pass_over(
      index: PyTree[Array], query: Array, position: Array
    ) -> tuple[PyTree[Array], Partial]:
      del position
      nothing = jnp.full(query.shape[:2], -jnp.inf, jnp.float32)
      output = jnp.zeros((*query.shape[:2], width), query.dtype)
      return index, Partial(output, nothing)

    def one(
      index: PyTree[Array], token: tuple[Array, Array]
    ) -> tuple[PyTree[Array], Partial]:
      some = jnp.any(token[1] >= 0)  # else padding of all rows
      look_up = functools.partial(
        self._attend_to_found, rows=rows, options=activations.attention
      )
      return jax.lax.cond(some, look_up, pass_over, index, *token)

    tokens = (jnp.moveaxis(queries, 2, 0), activations.positions.T)
    index, far = jax.lax.scan(one, self.index, tokens)
    return index, Partial(*(jnp.moveaxis(x, 0, 2) for x in far))

  def _attend_to_found(
    self,
    index: PyTree[Array],
    queries: Float[Array, "B N D"],
    positions: Int[Array, " B"],
    *,
    rows: Rows,
    options: AttentionOptions,
  ) -> tuple[PyTree[Array], Partial]:
    """The index after a token of each row, and attention to what it finds."""
    index, found = self._retrieved(
      index, options.rescale(queries), positions, rows
    )
    rows, slots = rows.on_device(found.slots)
    bias = found.bias
    if bias is not None:
      bias = bias.reshape(bias.shape[0], -1, bias.shape[-1])
    return index, sparse_decode(
      queries,
      rows.keys,
      rows.values,
      slots,
      bias,
      options=options,
      layer=rows.layer,
    )

  def _count_found(self, seen: Activations) -> Int[Array, "B K"]:
    """How many slots the last token of each row of a prompt looks up."""
    last = jnp.max(seen.positions, axis=1)
    queries = jnp.take_along_axis(
      _rescaled(seen).queries, last[:, None, None, None], axis=2
    )
    _, found = self.retrieved(self.index, queries[:, :, 0], last)
    slots = found.read_slots
    slots = slots.reshape(*slots.shape[:2], -1)
    read = named_slots(slots, self.stored.capacity)
    return jnp.sum(read.astype(jnp.int32), axis=-1)

  def retrieved(
    self,
    index: PyTree[Array],
    queries: Float[Array, "B N D"],
    positions: Int[Array, " B"],
  ) -> tuple[PyTree[Array], Found]:
    """What a token of each row looks up, and the index after it.

    Args:
      index: before the token.
      queries: of the token; their products with keys, times D^-1/2, are what
        the layer's softmax takes.
      positions: of the token, -1 for padding.
    """
    rest, rows = self._apart(None)
    return rest._retrieved(index, queries, positions, rows)

  def _retrieved(
    self,
    index: PyTree[Array],
    queries: Float[Array, "B N D"],
    positions: Int[Array, " B"],
    rows: Rows,
  ) -> tuple[PyTree[Array], Found]:
    retrieval, store = self.retrieval, self._store(positions)
    batch, kv_heads = store.valid.shape[:2]
    grouped = queries.reshape(batch, kv_heads, -1, queries.shape[-1])
    grouped = grouped.astype(jnp.float32)
    reads = _reads(self.count, kv_heads, self.most)
    real = jnp.broadcast_to((positions >= 0)[:, None], (batch, kv_heads))
    with jax.default_matmul_precision("highest"):
      if retrieval.reads_keys == "all":
        store = updated(store, keys=rows.copy_keys())
      elif retrieval.reads_keys == "candidates":
        slots = jax.vmap(jax.vmap(retrieval.candidates))(index, grouped, store)
        keys = rows.gather_keys(slots).astype(jnp.float32)
        store = updated(store, candidates=Candidates(slots, keys))
      found, news = jax.vmap(jax.vmap(self._found))(
        index, grouped, store, reads
      )
      index = jax.vmap(jax.vmap(retrieval.updated))(index, news, real)
    return index, found

  def _store(self, positions: Int[Array, " B"]) -> Store:
    """What tokens of these positions look up in, or will."""
    store = Store(None, self.stored.valid)
    if not self.retrieval.ring:
      return store
    ring = self._ring
    first = self.stored.capacity - self.spare
    places = self.resident.positions[..., ring.sinks :]
    seen = (places >= 0) & (places <= positions[:, None, None])
    keys = self.resident.keys[:, :, ring.sinks :].astype(jnp.float32)
    return dataclasses.replace(
      store,
      later=first + ring.gone if self.spare else None,
      waiting=Waiting(
        jnp.where(seen[..., None], keys, 0.0),
        jnp.where(seen, first + ring.waiting, -1),
      ),
    )

  def _found(
    self,
    index: PyTree[Array],
    queries: Float[Array, "G D"],
    store: Store,
    reads: Reads,
  ) -> tuple[Found, PyTree[Array]]:
    """As `Retrieval.retrieve`; everything where so much may be read."""
    found, news = self.retrieval.retrieve(index, queries, store, reads)
    everything = true_slots(store.valid, found.slots.shape[-1])
    whole = jnp.sum(store.valid.astype(jnp.int32)) <= reads.count
    bias = found.bias
    if bias is not None:
      bias = jnp.where(whole, 0.0, bias)
    return Found(jnp.where(whole, everything[None], found.slots), bias), news


def _rescaled(activations: Activations) -> Activations:
  """The same for methods that scale logits by D^-1/2."""
  queries = activations.attention.rescale(activations.queries)
  return updated(activations, queries=queries)


def _attend(cache: LayerCache, activations: Activations) -> Partial:
  return partial_attention(
    activations.queries,
    cache.keys,
    cache.values,
    activations.positions,
    cache.positions,
    options=activations.attention,
  )


def _reads(count: Int[Array, " B"], kv_heads: int, most: int) -> Reads:
  each = jnp.broadcast_to(count[:, None], (count.shape[0], kv_heads))
  return Reads(each, most)
