"""Indexing and retrieval for all rows and KV heads of a layer."""

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.heads import heads_of
from kvjax.cache.index import LayerIndex
from kvjax.cache.rows import Rows
from kvjax.cache.splitting import Split
from kvjax.errors import InputError
from kvjax.heads import by_kv_head
from kvjax.kernels.attention import AttentionOptions, Partial
from kvjax.kernels.dispatch import on_mesh
from kvjax.kernels.select import slots_to_mask
from kvjax.kernels.sparse_decode import sparse_decode
from kvjax.retrieval.base import (
  Candidates,
  KeyBudget,
  Prompt,
  Retrieval,
  Selection,
  Store,
)
from kvjax.struct import replace


def index_all(
  retrieval: Retrieval,
  layer: Int[Array, ""],
  split: Split,
  activations: Activations,
  budget: KeyBudget,
) -> PyTree[Array]:
  """Indexes all rows and KV heads of a prompt.

  Args:
    retrieval: the method.
    layer: index of the layer in the model.
    split: the tokens of the layer.
    activations: activations of the prompt, with the queries that are indexed.
    budget: how many keys each head will retrieve.
  """
  # Methods scale logits by D^-1/2.
  activations = replace(
    activations, queries=activations.attention.rescale(activations.queries)
  )
  shape = split.cache.positions.shape[:2]
  heads = jnp.arange(shape[1], dtype=jnp.int32)
  prompt = Prompt(
    heads_of(split.cache, activations),
    split.retrievable,
    jnp.broadcast_to(heads[None], shape),
    jnp.broadcast_to(layer, shape),
    split.start,
    split.end,
    together=shape[0] * shape[1],
  )
  # By default a TPU multiplies float32 in bfloat16, which would change the
  # ranks of close scores.
  with jax.default_matmul_precision("highest"):
    index: PyTree[Array] = jax.vmap(jax.vmap(retrieval.index))(prompt, budget)
  return index


@runtime_checkable
class Counted(Protocol):
  """A layer that retrieves a number of keys per token for each row."""

  @property
  def count(self) -> Int[Array, " B"]:
    """Keys to retrieve."""
    ...


def retrieve_on_mesh[Sparse: Counted](
  retrieve: Callable[..., tuple[LayerIndex, Partial]],
  layer: Sparse,
  queries: Float[Array, "B N S D"],
  positions: Int[Array, "B S"],
  rows: Rows,
  index: LayerIndex,
) -> tuple[LayerIndex, Partial]:
  """Lets each device retrieve for its own rows and heads.

  Which padding is skipped, and which branches are taken, devices decide alone.

  Args:
    retrieve: takes the other arguments, or a device's share of them.
    layer: the layer, without its index and without stored keys and values.
    queries: queries of the tokens that retrieve.
    positions: their positions, -1 for padding.
    rows: the stored keys and values.
    index: the index before the tokens.

  Returns:
    The index after the tokens, and the attention to what they retrieve.
  """
  if rows.on_host:  # the host works for all devices
    return retrieve(layer, queries, positions, rows, index)

  def run(
    layer: Sparse, count: Int[Array, " B"], *rest: Any
  ) -> tuple[PyTree[Array], Partial]:
    after, partial = retrieve(replace(layer, count=count), *rest)
    return after.arrays, partial

  # The counts are the only array of the layer without an axis of heads.
  kept, indexed = ("BK" if x.layer is None else "LBK" for x in (rows, index))
  arrays, partial = on_mesh(
    run,
    (replace(layer, count=None), layer.count, queries, positions, rows, index),
    ("BK", "B", "BK", "B", kept, indexed),
    (indexed, "BK"),
  )
  return replace(index, arrays=arrays), partial


def retrieve_all(
  retrieval: Retrieval,
  index: LayerIndex,
  queries: Float[Array, "B N D"],
  real: Bool[Array, " B"],
  store: Store,
  rows: Rows,
  budget: KeyBudget,
) -> tuple[LayerIndex, Selection]:
  """Retrieves the keys of one token of each row.

  Args:
    retrieval: the method.
    index: the index before the token.
    queries: queries of the token, scaled as by `AttentionOptions.rescale`.
    real: false for padding.
    store: the stored tokens of every head, without keys.
    rows: the stored keys and values.
    budget: how many keys each head retrieves.

  Returns:
    The index after the token, and what each head retrieves.
  """
  batch, kv_heads = store.valid.shape[:2]
  real = jnp.broadcast_to(real[:, None], (batch, kv_heads))
  grouped = by_kv_head(queries, kv_heads).astype(jnp.float32)

  def retrieve_with(store: Store) -> tuple[Selection, PyTree[Array]]:
    return jax.vmap(jax.vmap(functools.partial(_retrieve_head, retrieval)))(
      arrays, grouped, store, budget
    )

  arrays = index.read()
  with jax.default_matmul_precision("highest"):
    if retrieval.key_access == "all":
      retrieved = retrieve_with(replace(store, keys=rows.copy_keys()))
    elif retrieval.key_access == "candidates":
      slots = candidate_slots(retrieval, arrays, grouped, store, budget)
      candidates = Candidates(slots, rows.logits(slots, grouped))
      retrieved = retrieve_with(replace(store, candidates=candidates))
    else:
      retrieved = retrieve_with(store)
    selection, update = retrieved
    changes = jax.vmap(jax.vmap(retrieval.update_index))(arrays, update, real)
  return index.write(changes, selection.slots), selection


def candidate_slots(
  retrieval: Retrieval,
  index: PyTree[Array],
  queries: Float[Array, "B K G D"],
  store: Store,
  budget: KeyBudget,
) -> Int[Array, "B K U"]:
  """The candidates of all heads; all stored keys if the budget allows these.

  Short rows of a batch then attend to everything, as they would alone.
  """

  def of_head(
    index: PyTree[Array],
    queries: Float[Array, "G D"],
    store: Store,
    budget: KeyBudget,
  ) -> Int[Array, " U"]:
    slots = retrieval.candidates(index, queries, store)
    all_slots = store.list_all(slots.shape[0])
    return jnp.where(_fits(store, budget), all_slots, slots)

  slots: Array = jax.vmap(jax.vmap(of_head))(index, queries, store, budget)
  least = min(budget.max_keys, store.valid.shape[-1])
  if slots.shape[-1] < least:
    raise InputError(
      f"{type(retrieval).__name__} names {slots.shape[-1]} candidates; name "
      f"{least} or more, as many as a token may read, with -1 for none."
    )
  return slots


def attend_to_selection(
  queries: Float[Array, "B N D"],
  rows: Rows,
  selection: Selection,
  options: AttentionOptions,
) -> Partial:
  """Attends to the selected keys, with one query per head.

  Args:
    queries: queries of the token, not rescaled.
    rows: the stored keys and values.
    selection: what each KV head retrieves.
    options: scale and softcap of the layer.
  """
  batch, kv_heads, lists, length = selection.slots.shape
  # J is 1 or G, so this is one list per KV head or per query head.
  slots = selection.slots.reshape(batch, kv_heads * lists, length)
  bias, logits = (
    None if x is None else x.reshape(batch, -1, length)
    for x in (selection.bias, selection.logits)
  )
  return sparse_decode(
    queries,
    rows.keys,
    rows.values,
    slots,
    bias,
    options=options,
    layer=rows.layer,
    page=selection.page,
    logits=logits,
  )


def _retrieve_head(
  retrieval: Retrieval,
  index: PyTree[Array],
  queries: Float[Array, "G D"],
  store: Store,
  budget: KeyBudget,
) -> tuple[Selection, PyTree[Array]]:
  selection, update = retrieval.retrieve(index, queries, store, budget)
  if store.candidates is None:
    selection = _or_everything(selection, store, budget)
  return selection, update


def _or_everything(
  selection: Selection, store: Store, budget: KeyBudget
) -> Selection:
  """Selects all stored keys of a head if the budget allows that many.

  Short rows of a batch then attend to everything, as they would alone.
  """
  all_slots = store.list_all(selection.slots.shape[-1])
  fits = _fits(store, budget)
  bias = selection.bias
  if bias is not None:
    # MagicPIG's bias corrects for sampling; here every key is read.
    bias = jnp.where(fits, 0.0, bias)
  slots = jnp.where(fits, all_slots[None], selection.slots)
  # Tokens that are stored late leave gaps before them.
  page = selection.page if store.late_numbers is None else 1
  return Selection(slots, bias, page)


def _fits(store: Store, budget: KeyBudget) -> Bool[Array, ""]:
  """Whether the budget allows all stored keys of a head."""
  return jnp.sum(store.valid, dtype=jnp.int32) <= budget.num_keys


def retrieved_slots(
  selection: Selection, capacity: int
) -> Bool[Array, "B K F"]:
  """Computes the mask of slots that any query head of a group retrieves."""
  slots = selection.visible_slots
  # As a mask, slots that several query heads list count once.
  return slots_to_mask(slots.reshape(*slots.shape[:2], -1), capacity)


def broadcast_budget(
  num_keys: Int[Array, " B"], kv_heads: int, max_keys: int
) -> KeyBudget:
  """The same number of keys for all KV heads of a row.

  Args:
    num_keys: keys that each row retrieves.
    kv_heads: number of KV heads.
    max_keys: maximum over the rows.
  """
  shape = (num_keys.shape[0], kv_heads)
  return KeyBudget(jnp.broadcast_to(num_keys[:, None], shape), max_keys)
