"""The contract of retrieval methods, for the tests of any package."""

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
from kvjax.cache.sparse import SparseLayer
from kvjax.engine.generate import generate, reserve
from kvjax.engine.plans import Plan
from kvjax.engine.prefill import prefill, sweep
from kvjax.methods.full import FullKV
from kvjax.options.budgets import Retention, Tokens
from kvjax.prompts import Prompts
from kvjax.retrieval.base import Retrieval
from kvjax.retrieval.sparse_attention import SparseAttention
from kvjax.testing import checks
from kvjax.testing.checks import explained, require
from kvjax.testing.tiny import kept_positions, poisoned_layer

_READS = 10
_STORED = 60
_FREE = 64
_LAYERS = 3
_MOST_LAYERS = 64


def check_retrieval(retrieval: Retrieval) -> None:
  """Checks that a retrieval method does what the engine expects.

  It indexes and looks up in random projections and in the prompts of a tiny
  model: alone and in a batch, with NaN wherever there is no token, while
  decoding, and after its caches, which keep everything, have been saved and
  loaded; for that its class must be registered (`kvjax.register`). This takes
  seconds on a CPU.

  Args:
    retrieval: the method; it is asked for ten keys, whatever its `reads`.

  Raises:
    InputError: says in a sentence what is wrong and what would be right.

  Example:
    >>> import kvjax
    >>> check_retrieval(kvjax.get_retrieval("flat"))
  """
  checks.check_value(retrieval, Retrieval)
  retrieval = dataclasses.replace(retrieval, reads=0)
  dense = (n for n in range(_MOST_LAYERS) if not retrieval.is_dense(n))
  layer = next(dense, None)
  name = type(retrieval).__name__
  require(
    layer is not None,
    f"{name} attends to everything in all layers (dense_layers), so that there "
    "is nothing to check; leave one to look up in.",
  )
  assert layer is not None
  _check_lookups(retrieval, layer)
  _check_caches(retrieval, layer)


class _LookedUp(NamedTuple):
  """What a token of each row looked up in a layer.

  Attributes:
    slots: the lists.
    read: the same without what the bias hides.
    before: the index.
    after: the index after the token.
  """

  slots: Int[Array, "B K J M"]
  read: Int[Array, "B K J M"]
  before: Any
  after: Any


def _indexed(
  retrieval: Retrieval,
  layer: Int[Array, ""],
  activations: Activations,
  lengths: Int[Array, " B"],
) -> Any:
  cache = LayerCache.of(activations.only(()))
  counts = jnp.minimum(lengths, _READS)
  return SparseLayer.of(retrieval, layer, cache, activations, counts, _READS)


def _looked_up(
  cache: SparseLayer,
  queries: Float[Array, "B N D"],
  positions: Int[Array, " B"],
) -> _LookedUp:
  after, found = cache.retrieve(cache.index, queries, positions)
  return _LookedUp(found.slots, found.visible_slots, cache.index, after)


def _check_lookups(retrieval: Retrieval, layer: int) -> None:
  """Refuses lookups that break the contract in a layer by itself."""
  name = type(retrieval).__name__
  lengths, padded = _lengths(retrieval), max(_lengths(retrieval)) + 8
  one, other = (checks.all_activations(s, lengths, padded) for s in (0, 7))
  index = jax.jit(_indexed, static_argnums=0)
  look_up = jax.jit(_looked_up)

  def run(
    activations: Activations,
    queries: Activations,
    lengths: Sequence[int],
    spoil: bool = False,
  ) -> tuple[SparseLayer, list[list[list[int]]]]:
    own = jnp.asarray(lengths, jnp.int32)
    with explained(f"{name} fails to index a prompt"):
      cache = index(retrieval, jnp.int32(layer), activations, own)
    require(
      isinstance(cache, SparseLayer),
      f"{name} leaves nothing to look up in {max(lengths)} tokens; check it "
      "with fewer sinks and local tokens.",
    )
    if spoil:
      cache = poisoned_layer(cache)
    with explained(f"{name} fails to look up"):
      found = look_up(cache, queries.queries[:, :, 0], own)
    _check_index(name, found)
    return cache, _checked(name, cache, found)

  cache, found = run(one, other, lengths)
  _, spoiled = run(one, other, lengths, spoil=True)
  require(
    found == spoiled,
    f"What empty slots hold must not change what {name} looks up; NaN does: "
    "mask by store.valid.",
  )
  places = ((2, one), (1, other), (0, one))
  swapped = checks.rows_of([(source, row) for row, source in places], padded)
  asked = checks.rows_of([(other, row) for row in (2, 1, 0)], padded)
  _, turned = run(swapped, asked, lengths[::-1])
  require(
    turned[0] == found[2] and turned[2] == found[0],
    f"What {name} looks up for a row must not depend on its batch mates nor on "
    "its place among them; it does.",
  )
  short = lengths[1]
  alone = checks.rows_of([(one, 1)], short + 3)
  asked = checks.rows_of([(other, 1)], short + 3)
  _, lone = run(alone, asked, [short])
  require(
    lone[0] == found[1],
    f"What {name} looks up for a row must not depend on its padding; it does.",
  )
  eager = _looked_up(
    cache, other.queries[:, :, 0], jnp.asarray(lengths, jnp.int32)
  )
  require(
    _checked(name, cache, eager) == found,
    f"{name} must look up the same compiled or not; it does not.",
  )


def _lengths(retrieval: Retrieval) -> list[int]:
  """Rows with so much to look up, or somewhat less."""
  resident = retrieval.sinks + retrieval.local_range[1]
  return [resident + _STORED - cut for cut in (0, 24, 12)]


def _check_index(name: str, found: _LookedUp) -> None:
  """Refuses an index that a token makes another kind of thing."""
  kinds = [
    jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)
    for tree in (found.before, found.after)
  ]
  require(
    kinds[0] == kinds[1],
    f"{name}.update_index must return an index of the same shapes and dtypes; "
    f"it makes {kinds[1]} of {kinds[0]}.",
  )
  for leaf in jax.tree.leaves((found.before, found.after)):
    require(
      not np.issubdtype(leaf.dtype, np.inexact)
      or bool(jnp.all(jnp.isfinite(leaf))),
      f"The index of {name} must hold finite numbers, whatever empty slots "
      "hold; mask by prompt.retrievable.",
    )


def _checked(
  name: str, cache: SparseLayer, found: _LookedUp
) -> list[list[list[int]]]:
  """For each row and list, the sorted slots that are read, if they are such."""
  size, valid = cache.stored.capacity, np.asarray(cache.stored.valid)
  slots = np.asarray(found.slots)
  outside = slots[(slots < -1) | (slots >= size)]
  require(
    not outside.size,
    f"{name} looks up slot {outside[:1].sum()} of {size} that are stored; give "
    f"0 to {size - 1}, and -1 for none.",
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
        f"{name} looks up slot {empty[:1]}, which holds no token; only slots "
        "of store.valid may be named.",
      )
  return [
    [
      sorted(listed[listed >= 0].tolist())
      for listed in row.reshape(-1, row.shape[-1])
    ]
    for row in np.asarray(found.read)
  ]


def _check_caches(retrieval: Retrieval, layer: int) -> None:
  """Refuses caches of a model that break the contract."""
  name, lengths = type(retrieval).__name__, _lengths(retrieval)
  model = checks.model_for(max(_LAYERS, layer + 1), max(lengths))
  params, rows = model.init(), checks.tokens(lengths)
  whole = Retention(1.0)
  plans = [
    Plan(FullKV(), whole, sparse=SparseAttention(retrieval, Tokens(count)))
    for count in (_READS, 2 * _READS)
  ]
  with explained(f"A sweep with {name} fails"):
    caches, _ = sweep(model, params, Prompts.of(rows), plans)
    alone, _ = prefill(model, params, Prompts.of(rows), plans[0])
  cache = caches[0]
  require(
    checks.same(alone, cache),
    f"A sweep must index with {name} as a prefill does; it does not.",
  )
  _check_whole(name, cache, lengths)
  with explained(f"Asking a cache of {name} fails"):
    checks.check_asked(name, model, cache)
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
  more = np.asarray(checks.QUESTIONS.lengths) + checks.DECODING.max_new_tokens
  _check_whole(name, after, [*map(int, lengths + more)])


def _check_whole(name: str, cache: Cache, lengths: Sequence[int]) -> None:
  for row, length in enumerate(lengths):
    for heads in kept_positions(cache, row):
      for places in heads:
        require(
          places == [*range(length)],
          f"A cache of {name} must hold all {length} tokens of a row; it holds "
          f"{places}.",
        )
