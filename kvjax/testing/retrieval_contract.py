"""The checks of retrieval methods, for the tests of any package."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache
from kvjax.cache.retrieve import broadcast_budget, index_all
from kvjax.cache.sparse import SparseLayer
from kvjax.cache.splitting import split_tokens
from kvjax.engine.compression_plan import Plan
from kvjax.engine.generate import generate, reserve
from kvjax.engine.prefill import prefill, sweep
from kvjax.kernels.attention.options import PLAIN
from kvjax.methods.full import FullKV
from kvjax.options.budgets import Retention, Tokens
from kvjax.prompts import Prompts
from kvjax.retrieval.base import Retrieval, Selection
from kvjax.retrieval.sparse_attention import SparseAttention
from kvjax.testing import checks
from kvjax.testing.checks import explain, require
from kvjax.testing.tiny import TinyModel, poison_layer

_READS = 10
_STORED = 60
_FREE = 64
_LAYERS = 3
_MOST_LAYERS = 64


def check_retrieval(retrieval: Retrieval) -> None:
  """Checks that a retrieval method meets the engine's requirements.

  The method indexes and retrieves from random activations and from the prompts
  of a tiny model, one of whose layers has a window: single rows and batches,
  NaN in all empty slots, and decoding. Its caches, which keep everything, are
  saved and loaded, for which its class must be registered (`kvjax.register`).
  This takes seconds on a CPU.

  Args:
    retrieval: the method; it retrieves ten keys, whatever its `keys`.

  Raises:
    InputError: a check fails; the message says what is wrong and how to fix it.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import check_retrieval
    >>> check_retrieval(kvjax.get_retrieval("flat"))
  """
  checks.check_value(retrieval, Retrieval)
  # With `keys`, the method would ignore the budget of these checks.
  retrieval = dataclasses.replace(retrieval, keys=0)
  indexed = (n for n in range(_MOST_LAYERS) if not retrieval.is_dense(n))
  layer = next(indexed, None)
  name = type(retrieval).__name__
  require(
    layer is not None,
    f"{name} attends to everything in all layers (dense_layers), so that there "
    "is nothing to check; leave one to retrieve from.",
  )
  assert layer is not None
  _check_queries(retrieval, layer)
  _check_retrieval(retrieval, layer)
  _check_ranking(retrieval, layer)
  _check_caches(retrieval, layer)


class _Retrieved(NamedTuple):
  """What a token of each row retrieved in a layer.

  Attributes:
    selection: the lists of slots.
    before: the index before the token.
    after: the index after the token.
  """

  selection: Selection
  before: Any
  after: Any


def _index(
  retrieval: Retrieval,
  layer: Int[Array, ""],
  activations: Activations,
  lengths: Int[Array, " B"],
) -> SparseLayer | None:
  cache = LayerCache.of(activations.only(()))
  counts = jnp.minimum(lengths, _READS)
  return SparseLayer.of(retrieval, layer, cache, activations, counts, _READS)


def _retrieve(
  cache: SparseLayer,
  queries: Float[Array, "B N D"],
  positions: Int[Array, " B"],
) -> _Retrieved:
  after, result = cache.retrieve(cache.index, queries, positions, PLAIN)
  return _Retrieved(result, cache.index, after)


def _check_queries(retrieval: Retrieval, layer: int) -> None:
  """Refuses what is no number of queries, and none if the index reads any."""
  name, length = type(retrieval).__name__, max(_lengths(retrieval))
  count = retrieval.num_queries(length)
  require(
    count is None or (type(count) is int and count >= 0),
    f"{name}.num_queries must return a number of the prompt's last queries, or "
    f"None for all; it returns {count!r}.",
  )
  # An index of some queries may depend on all that it is given.
  if count != 0:
    return
  one, other = (
    checks.all_activations(s, [length, length], length) for s in (0, 7)
  )
  counts = jnp.full(2, _READS, jnp.int32)
  budget = broadcast_budget(counts, checks.KV_HEADS, _READS)

  @jax.jit
  def index(layer: Int[Array, ""], activations: Activations) -> Any:
    cache = LayerCache.of(activations.only(()))
    split = split_tokens(retrieval, cache, _READS)
    # The checks that follow refuse to leave nothing to retrieve from.
    return split and index_all(retrieval, layer, split, activations, budget)

  with explain(f"{name} fails to index a prompt"):
    first, second = (
      index(jnp.int32(layer), dataclasses.replace(one, queries=x.queries))
      for x in (one, other)
    )
  require(
    checks.same(first, second),
    f"The index of {name} reads queries of the prompt, and {name}.num_queries, "
    "which may be that of a class it derives from, is 0: a prefill drops them; "
    "return the number of last queries that it reads, or None for all.",
  )


def _check_retrieval(retrieval: Retrieval, layer: int) -> None:
  """Checks retrieval in a single layer."""
  name = type(retrieval).__name__
  lengths, padded = _lengths(retrieval), max(_lengths(retrieval)) + 8
  one, other = (checks.all_activations(s, lengths, padded) for s in (0, 7))
  index = jax.jit(_index, static_argnums=0)
  retrieve_compiled = jax.jit(_retrieve)

  def run(
    activations: Activations,
    queries: Activations,
    lengths: Sequence[int],
    poison: bool = False,
  ) -> tuple[SparseLayer, list[list[list[int]]]]:
    row_lengths = jnp.asarray(lengths, jnp.int32)
    with explain(f"{name} fails to index a prompt"):
      cache = index(retrieval, jnp.int32(layer), activations, row_lengths)
    require(
      cache is not None,
      f"{name} leaves nothing to retrieve from {max(lengths)} tokens; check it "
      "with fewer sinks and local tokens.",
    )
    if poison:
      cache = poison_layer(cache)
    with explain(f"{name} fails to retrieve"):
      result = retrieve_compiled(cache, queries.queries[:, :, 0], row_lengths)
    _check_index(name, result)
    return cache, _check_slots(name, cache, result)

  cache, slots = run(one, other, lengths)
  _, poisoned = run(one, other, lengths, poison=True)
  require(
    slots == poisoned,
    f"What empty slots hold must not change what {name} retrieves; NaN does: "
    "mask by store.valid.",
  )
  places = ((2, one), (1, other), (0, one))
  swapped = checks.rows_of([(source, row) for row, source in places], padded)
  swapped_queries = checks.rows_of([(other, row) for row in (2, 1, 0)], padded)
  _, swapped_slots = run(swapped, swapped_queries, lengths[::-1])
  require(
    swapped_slots[0] == slots[2] and swapped_slots[2] == slots[0],
    f"What {name} retrieves for a row must not depend on its batch mates or "
    "its place among them; it does.",
  )
  short = lengths[1]
  alone = checks.rows_of([(one, 1)], short + 3)
  alone_queries = checks.rows_of([(other, 1)], short + 3)
  _, single = run(alone, alone_queries, [short])
  require(
    single[0] == slots[1],
    f"What {name} retrieves for a row must not depend on its padding; it does.",
  )
  eager = _retrieve(
    cache, other.queries[:, :, 0], jnp.asarray(lengths, jnp.int32)
  )
  require(
    _check_slots(name, cache, eager) == slots,
    f"{name} must retrieve the same compiled or not; it does not.",
  )


def _check_ranking(retrieval: Retrieval, layer: int) -> None:
  """Checks that the host ranks candidates as the device does."""
  if retrieval.key_access != "candidates" or retrieval.ring_size:
    return
  name, lengths = type(retrieval).__name__, _lengths(retrieval)
  one, other = (
    checks.all_activations(s, lengths, max(lengths)) for s in (0, 7)
  )
  token = Activations(
    queries=other.queries[:, :, :1],
    keys=other.keys[:, :, :1],
    values=other.values[:, :, :1],
    positions=jnp.asarray(lengths, jnp.int32)[:, None],
  )
  here = jax.jit(_index, static_argnums=0)(
    retrieval, jnp.int32(layer), one, jnp.asarray(lengths, jnp.int32)
  )
  offloading = dataclasses.replace(retrieval, offload=True)
  there = dataclasses.replace(here, retrieval=offloading).offload()
  attend = jax.jit(SparseLayer.attend)
  with explain(f"{name} fails to rank candidates on the host"):
    (expected, after), (output, own) = (
      attend(cache, token) for cache in (here, there)
    )
  close = [
    np.allclose(x, y, rtol=1e-4, atol=1e-4)
    for x, y in zip(
      jax.tree.leaves((output, own.index)),
      jax.tree.leaves((expected, after.index)),
      strict=True,
    )
  ]
  require(
    all(close),
    f"With offload=true, {name} must read and learn what it does without; make "
    "`ranking` and `update_of` say what `retrieve` does.",
  )


def _lengths(retrieval: Retrieval) -> list[int]:
  """Lengths of rows with at most `_STORED` retrievable tokens."""
  resident = retrieval.sinks + retrieval.local_range[1]
  return [resident + _STORED - cut for cut in (0, 24, 12)]


def _check_index(name: str, result: _Retrieved) -> None:
  """Refuses an index whose shapes or dtypes change, or that is not finite."""
  kinds = [
    jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)
    for tree in (result.before, result.after)
  ]
  require(
    kinds[0] == kinds[1],
    f"{name}.update_index must return an index of the same shapes and dtypes; "
    f"it makes {kinds[1]} of {kinds[0]}.",
  )
  for leaf in jax.tree.leaves((result.before, result.after)):
    require(
      not np.issubdtype(leaf.dtype, np.inexact)
      or bool(jnp.all(jnp.isfinite(leaf))),
      f"The index of {name} must hold finite numbers, whatever empty slots "
      "hold; mask by prompt.retrievable.",
    )


def _check_slots(
  name: str, cache: SparseLayer, result: _Retrieved
) -> list[list[list[int]]]:
  """Checks slots; returns the sorted visible ones for each row and list."""
  size, valid = cache.stored.capacity, np.asarray(cache.stored.valid)
  slots, page = np.asarray(result.selection.slots), result.selection.page
  outside = slots[(slots < -1) | (slots >= size)]
  require(
    not outside.size,
    f"{name} retrieves slot {outside[:1].sum()} of {size} that are stored; "
    f"give 0 to {size - 1}, and -1 for none.",
  )
  require(
    slots.shape[-1] % page == 0 and _in_pages(slots, page, size),
    f"{name} says that it lists whole pages of {page} slots; start each at a "
    f"multiple of {page}, end it within the {size} that are stored and name "
    "its slots in order, or leave `page` at 1.",
  )
  for row, head in np.ndindex(*valid.shape[:2]):
    for listed in slots[row, head]:
      filled = listed[listed >= 0].tolist()
      require(
        len({*filled}) == len(filled),
        f"{name} must name a slot once in a list; it names {sorted(filled)}.",
      )
      empty = [slot for slot in filled if not valid[row, head, slot]]
      require(
        not empty,
        f"{name} retrieves slot {empty[:1]}, which holds no token; only slots "
        "of store.valid may be named.",
      )
  return [
    [
      sorted(listed[listed >= 0].tolist())
      for listed in row.reshape(-1, row.shape[-1])
    ]
    for row in np.asarray(result.selection.visible_slots)
  ]


def _in_pages(slots: Int[np.ndarray, "B K J M"], page: int, size: int) -> bool:
  """Whether entries are the slots of one whole page after another, or -1."""
  pages = slots.reshape(-1, page)
  first = np.max(pages, axis=1, keepdims=True) // page * page
  in_place = (pages < 0) | (pages == first + np.arange(page))
  return bool(np.all(in_place) and np.all(first + page <= size))


def _check_caches(retrieval: Retrieval, layer: int) -> None:
  """Checks the caches of a model."""
  name, lengths = type(retrieval).__name__, _lengths(retrieval)
  model = checks.model_for(max(_LAYERS, layer + 1), max(lengths))
  params, rows = model.init(), checks.tokens(lengths)
  everything = Retention(1.0)
  plans = [
    Plan(FullKV(), everything, sparse=SparseAttention(retrieval, Tokens(count)))
    for count in (_READS, 2 * _READS)
  ]
  with explain(f"A sweep with {name} fails"):
    caches, _ = sweep(model, params, Prompts.of(rows), plans)
    alone, _ = prefill(model, params, Prompts.of(rows), plans[0])
  cache = caches[0]
  require(
    checks.same(alone, cache),
    f"A sweep must index with {name} as a prefill does; it does not.",
  )
  _check_whole(name, model, cache, lengths)
  with explain(f"Asking a cache of {name} fails"):
    checks.check_repeatable(name, model, cache)
  loaded = checks.check_saved(name, model, cache)
  after = generate(
    model,
    params,
    reserve(loaded, _FREE),
    checks.QUESTIONS,
    checks.DECODING,
    keep=True,
  ).cache
  assert after is not None
  # There are no stop tokens, so every row has this many more.
  more = np.asarray(checks.QUESTIONS.lengths) + checks.DECODING.max_new_tokens
  _check_whole(name, model, after, [*map(int, lengths + more)])


def _check_whole(
  name: str, model: TinyModel, cache: Cache, lengths: Sequence[int]
) -> None:
  for row, length in enumerate(lengths):
    for heads in checks.global_positions(model, cache, row).values():
      for places in heads:
        require(
          places == [*range(length)],
          f"A cache of {name} must hold all {length} tokens of a row; it holds "
          f"{places}.",
        )
