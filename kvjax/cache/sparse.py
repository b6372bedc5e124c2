"""A layer's cache that keeps all tokens and reads what a method retrieves."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.base import Arrange, Index, Layer, LayerSizes
from kvjax.cache.index import LayerIndex
from kvjax.cache.layers import LayerCache, attend_partially, attention_output
from kvjax.cache.ranked import attend_to_ranked
from kvjax.cache.retrieve import (
  attend_to_selection,
  broadcast_budget,
  index_all,
  retrieve_all,
  retrieve_on_mesh,
  retrieved_slots,
)
from kvjax.cache.ring import Ring
from kvjax.cache.rows import Rows
from kvjax.cache.splitting import split_tokens
from kvjax.errors import InputError
from kvjax.kernels.attention import AttentionOptions, Partial, merge
from kvjax.placement import to_host
from kvjax.retrieval.base import KeyBudget, Retrieval, Selection, Store
from kvjax.struct import replace, static, struct


@struct
class SparseLayer(Layer):
  """Resident tokens, which every token attends to, and retrievable tokens.

  Attributes:
    resident: first and last tokens of the prompt, and the tokens after it. If
      the method limits their number, they are laid out as a
      `kvjax.cache.ring.Ring`.
    stored: the other tokens, which are retrieved.
    index: index of the method.
    count: keys to retrieve per token, for each row.
    num_retrieved: keys that the prompt's last token retrieves for each KV head,
      counted once if several query heads read them.
    most: maximum of `count` over the batch.
    retrieval: the method.
    spare: slots at the end of `stored` for tokens that leave the ring.
  """

  resident: LayerCache
  stored: LayerCache
  index: PyTree[Array]
  count: Int[Array, " B"]
  num_retrieved: Int[Array, "B K"]
  most: int = static()
  retrieval: Retrieval = static()
  spare: int = static(default=0)

  @classmethod
  def of(
    cls,
    retrieval: Retrieval,
    layer: Int[Array, ""],
    cache: LayerCache,
    activations: Activations,
    count: Int[Array, " B"],
    most: int,
  ) -> "SparseLayer | None":
    """Indexes a layer after the prefill of its prompt.

    Args:
      retrieval: the method.
      layer: index of the layer in the model.
      cache: the tokens that are kept, in the first slots of each head.
      activations: activations of the prompt.
      count: keys to retrieve per token, for each row.
      most: maximum of `count`.

    Returns:
      The indexed layer; None if every token will always read all keys.
    """
    split = split_tokens(retrieval, cache, most)
    if split is None:
      return None
    kv_heads = cache.positions.shape[1]
    budget = broadcast_budget(count, kv_heads, most)
    # Others of the sweep may read more.
    queries = retrieval.num_queries(activations.positions.shape[1])
    read = activations.with_queries(queries)
    index = index_all(retrieval, layer, split, read, budget)
    resident, stored = split.resident(retrieval), split.stored()
    zeros = jnp.zeros_like(cache.lengths)
    indexed = cls(resident, stored, index, count, zeros, most, retrieval)
    num_retrieved = indexed._count_retrieved(activations)
    return dataclasses.replace(indexed, num_retrieved=num_retrieved)

  @property
  def capacity(self) -> int:
    """Slots for appended tokens, filled or not."""
    return self.resident.capacity + self.spare

  @property
  def fixed_slots(self) -> int:
    """Slots of the ring, if there is one."""
    return self.resident.capacity if self.retrieval.ring_size else 0

  @property
  def sizes(self) -> LayerSizes:
    """Heads and widths of the resident slots."""
    return self.resident.sizes

  @property
  def next_slot(self) -> Int[Array, "*L"]:
    """The next slot to write."""
    return self.resident.cursor

  @property
  def lengths(self) -> Int[Array, "*L B K"]:
    """Number of tokens per row and KV head."""
    return self.resident.lengths + self.stored.lengths

  @property
  def num_attended(self) -> Int[Array, "*L B K"]:
    """Tokens that a token attends to; see `num_retrieved`."""
    return self.resident.lengths + self.num_retrieved

  def offload(self) -> "SparseLayer":
    """Moves the stored tokens to the host, if requested and possible."""
    if not self.retrieval.offload:
      return self
    keys, values = to_host((self.stored.keys, self.stored.values))
    return replace(self, stored=replace(self.stored, keys=keys, values=values))

  def map_slots(self, change: Callable[[Any], Any]) -> "SparseLayer":
    """Changes the resident and the stored slots."""
    return replace(
      self,
      resident=self.resident.map_slots(change),
      stored=self.stored.map_slots(change),
    )

  def row_positions(
    self, row: int, index: int | None = None
  ) -> list[list[int]]:
    """Positions of the tokens of a row, per KV head; on the host."""
    resident, stored = (
      part.row_positions(row, index) for part in (self.resident, self.stored)
    )
    return [one + other for one, other in zip(resident, stored, strict=True)]

  def grow(self, extra: int) -> "SparseLayer":
    """Adds `extra` empty slots for appended tokens."""
    if not self.retrieval.ring_size:
      return replace(self, resident=self.resident.grow(extra))
    spare = self.spare + extra
    return replace(self, stored=self.stored.grow(extra), spare=spare)

  def append(
    self, activations: Activations, index: Index = None
  ) -> "SparseLayer":
    """Appends a block to the resident tokens, which must have room for it.

    Raises:
      InputError: the block is longer than the ring of resident tokens.
    """
    ring_size = self.retrieval.ring_size
    if not ring_size:
      return replace(self, resident=self.resident.append(activations, index))
    length = activations.positions.shape[1]
    if length > ring_size:
      raise InputError(
        f"A turn of {length} tokens, padding included, does not fit into the "
        f"{ring_size} places that are resident besides the sinks; raise "
        "max_resident."
      )
    kv_heads = self.resident.positions.shape[-2]
    block = LayerCache.of(activations.with_kv_heads(kv_heads))
    # Before `at`, which would copy the layer's stored keys out of the stack.
    layers, rows = self._split_rows(index)
    layer = layers.at(index)
    ring, moved = layer._ring.append(block)
    rows = rows.write(moved.keys, moved.values, moved.start)
    updated = replace(layer, resident=ring.resident, stored=ring.stored)
    return layers.put(index, layer, updated)._join_rows(rows)

  def step(
    self, activations: Activations, index: Index, arrange: Arrange | None = None
  ) -> tuple[Float[Array, "B N S Dv"], "SparseLayer"]:
    """Appends a block and attends; keys are never rerotated here."""
    assert arrange is None
    layers, rows = self.append(activations, index)._split_rows(index)
    layer_index = LayerIndex(layers.index, index)
    # The index is large, too: it is read and written inside its stack.
    layer = replace(layers, index=None).at(index)
    output, layer_index = layer._attend(activations, rows, layer_index)
    layers = replace(layers, index=layer_index.arrays)
    return output, layers._join_rows(rows)

  def _split_rows(self, index: Index) -> tuple["SparseLayer", Rows]:
    """Splits off the stored keys and values, which stay in their stack."""
    stored = self.stored
    layer = replace(self, stored=replace(stored, keys=None, values=None))
    return layer, Rows(stored.keys, stored.values, index)

  def _join_rows(self, rows: Rows) -> "SparseLayer":
    """Puts the stored keys and values back."""
    stored = replace(self.stored, keys=rows.keys, values=rows.values)
    return replace(self, stored=stored)

  @property
  def _ring(self) -> Ring:
    return Ring(
      self.resident, self.stored, self.retrieval.ring_size, self.spare
    )

  def attend(
    self, activations: Activations
  ) -> tuple[Float[Array, "B N S Dv"], "SparseLayer"]:
    """Attends to the resident tokens and to the retrieved ones."""
    layer, rows = self._split_rows(None)
    output, index = layer._attend(activations, rows, LayerIndex(self.index))
    return output, replace(self, index=index.arrays)

  def _attend(
    self, activations: Activations, rows: Rows, index: LayerIndex
  ) -> tuple[Float[Array, "B N S Dv"], LayerIndex]:
    resident = attend_partially(self.resident, activations)
    queries = activations.queries
    # By what the tokens are, not by their number: a question may be a single
    # one, with or without padding.
    if self.retrieval.turn == "dense" and not activations.decoded:
      keys, values = rows.copy()
      stored = replace(self.stored, keys=keys, values=values)
      retrieved = attend_partially(stored, activations)
    else:
      single = queries.shape[2] == 1
      run = SparseLayer._retrieve_once if single else SparseLayer._retrieve_each
      run = functools.partial(run, options=activations.attention)
      index, retrieved = retrieve_on_mesh(
        run, self, queries, activations.positions, rows, index
      )
    return attention_output(merge(resident, retrieved), activations), index

  def _retrieve_once(
    self,
    queries: Float[Array, "B N 1 D"],
    positions: Int[Array, "B 1"],
    rows: Rows,
    index: LayerIndex,
    options: AttentionOptions,
  ) -> tuple[LayerIndex, Partial]:
    """Retrieves for one token per row and attends to the retrieved keys.

    With rows on the host it has no branch, so that the device can attend to the
    resident tokens while the host works.

    Returns:
      The index after the tokens, and the attention.
    """
    index, partial = self._attend_to_retrieved(
      index, queries[:, :, 0], positions[:, 0], rows=rows, options=options
    )
    return index, Partial(partial.output[:, :, None], partial.lse[:, :, None])

  def _retrieve_each(
    self,
    queries: Float[Array, "B N S D"],
    positions: Int[Array, "B S"],
    rows: Rows,
    index: LayerIndex,
    options: AttentionOptions,
  ) -> tuple[LayerIndex, Partial]:
    """Retrieves for several tokens per row, one after another."""
    width = rows.values.shape[-1]

    def skip(
      index: LayerIndex,
      query: Float[Array, "B N D"],
      position: Int[Array, " B"],
    ) -> tuple[LayerIndex, Partial]:
      del position
      lse = jnp.full(query.shape[:2], -jnp.inf, jnp.float32)
      output = jnp.zeros((*query.shape[:2], width), query.dtype)
      return index, Partial(output, lse)

    def scan_token(
      index: LayerIndex, token: tuple[Float[Array, "B N D"], Int[Array, " B"]]
    ) -> tuple[LayerIndex, Partial]:
      any_real = jnp.any(token[1] >= 0)  # skip padding of all rows
      attend = functools.partial(
        self._attend_to_retrieved, rows=rows, options=options
      )
      return jax.lax.cond(any_real, attend, skip, index, *token)

    # In order, since each token may change the index that the next one reads.
    tokens = (jnp.moveaxis(queries, 2, 0), positions.T)
    index, partial = jax.lax.scan(scan_token, index, tokens)
    return index, Partial(*(jnp.moveaxis(x, 0, 2) for x in partial))

  def _attend_to_retrieved(
    self,
    index: LayerIndex,
    queries: Float[Array, "B N D"],
    positions: Int[Array, " B"],
    *,
    rows: Rows,
    options: AttentionOptions,
  ) -> tuple[LayerIndex, Partial]:
    """Retrieves for a token and attends to the keys, without an axis S."""
    if rows.on_host:
      ranked = attend_to_ranked(
        self.retrieval,
        index,
        queries,
        positions >= 0,
        self._store(positions),
        rows,
        self._budget,
        options,
      )
      if ranked is not None:
        return ranked
    # Methods scale logits by D^-1/2; `sparse_decode` applies the layer's own
    # scale, so only the former get rescaled queries. They are not rounded, as
    # their logits may be those of the attention.
    rescaled = options.rescale(queries.astype(jnp.float32))
    index, selection = self._retrieve(index, rescaled, positions, rows)
    return index, attend_to_selection(queries, rows, selection, options)

  def _count_retrieved(self, activations: Activations) -> Int[Array, "B K"]:
    """Number of slots that the last token of each prompt retrieves."""
    last = activations.with_queries(1)
    _, selection = self.retrieve(
      self.index,
      last.queries[:, :, 0],
      last.query_positions[:, 0],
      activations.attention,
    )
    retrieved = retrieved_slots(selection, self.stored.capacity)
    return jnp.sum(retrieved, axis=-1, dtype=jnp.int32)

  def retrieve(
    self,
    index: PyTree[Array],
    queries: Float[Array, "B N D"],
    positions: Int[Array, " B"],
    options: AttentionOptions,
  ) -> tuple[PyTree[Array], Selection]:
    """Retrieves for a token of each row.

    Args:
      index: the index before the token.
      queries: queries of the token, as the layer's attention uses them.
      positions: position of the token, -1 for padding.
      options: of the layer's attention.

    Returns:
      The index after the token, and what each KV head retrieves.
    """
    layer, rows = self._split_rows(None)
    # As while decoding, where the scaled queries are not rounded, either.
    rescaled = options.rescale(queries.astype(jnp.float32))
    after, selection = layer._retrieve(
      LayerIndex(index), rescaled, positions, rows
    )
    return after.arrays, selection

  def _retrieve(
    self,
    index: LayerIndex,
    queries: Float[Array, "B N D"],
    positions: Int[Array, " B"],
    rows: Rows,
  ) -> tuple[LayerIndex, Selection]:
    store = self._store(positions)
    return retrieve_all(
      self.retrieval, index, queries, positions >= 0, store, rows, self._budget
    )

  @property
  def _budget(self) -> KeyBudget:
    kv_heads = self.stored.positions.shape[1]
    return broadcast_budget(self.count, kv_heads, self.most)

  def _store(self, positions: Int[Array, " B"]) -> Store:
    """The stored tokens, and those that will be, up to these positions."""
    store = Store(None, self.stored.valid)
    if not self.retrieval.ring_size:
      return store
    # Late tokens are numbered after the prompt's slots, also once they move.
    first = self.stored.capacity - self.spare
    return dataclasses.replace(
      store,
      late_numbers=first + self._ring.moved_tokens if self.spare else None,
      pending=self._ring.pending(positions, first),
    )
