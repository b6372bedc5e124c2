"""The contract of retrieval methods finds what it is to find, and says it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.retrieval import CTkvr, Flat, Selection
from kvjax.testing import TinyModel, check_retrieval, poison_cache


@dataclasses.dataclass(frozen=True)
class Reading(Flat):
  local: int = 8

  def retrieve(self, index, queries, store, reads):
    found, news = super().retrieve(index, queries, store, reads)
    return Selection(self.changed(found.slots, store)), news


class BeyondTheStore(Reading):
  def changed(self, slots, store):
    return jnp.where(slots >= 0, slots + store.valid.shape[0], -1)


class Twice(Reading):
  def changed(self, slots, store):
    return jnp.broadcast_to(slots[:, :1], slots.shape)


class EmptyReads(Reading):
  def changed(self, slots, store):
    return jnp.where(slots >= 0, slots * 0 + store.valid.shape[0] - 1, -1)[
      :, :1
    ]


class ScatteredPages(Reading):
  def retrieve(self, index, queries, store, reads):
    found, news = Flat.retrieve(self, index, queries, store, reads)
    return Selection(found.slots, page=2), news


class CutPages(Reading):
  """Of 25 slots, so that the last page ends beyond the store."""

  def retrieve(self, index, queries, store, reads):
    _, news = Flat.retrieve(self, index, queries, store, reads)
    last = store.valid.shape[0] - 1
    page = last // 25 * 25 + jnp.arange(25, dtype=jnp.int32)
    page = jnp.where(page <= last, page, -1)
    return Selection(
      jnp.where(store.valid[page], page, -1)[None], page=25
    ), news


@dataclasses.dataclass(frozen=True)
class Growing(Reading):
  def index(self, prompt, reads):
    return jnp.zeros((1,))

  def retrieve(self, index, queries, store, reads):
    return Flat.retrieve(self, None, queries, store, reads)

  def update_index(self, index, update, real):
    return jnp.concatenate([index, index])


@dataclasses.dataclass(frozen=True)
class TooFewCandidates(CTkvr):
  def candidates(self, index, queries, store):
    return super().candidates(index, queries, store)[:3]


@dataclasses.dataclass(frozen=True)
class RankingOthers(CTkvr):
  def ranking(self, index, budget):
    fewer = dataclasses.replace(budget, num_keys=budget.num_keys - 1)
    return dataclasses.replace(super().ranking(index, budget), attended=fewer)


@dataclasses.dataclass(frozen=True)
class LearningOthers(CTkvr):
  def update_of(self, index, queries, listed):
    direction, listed = super().update_of(index, queries, listed)
    return direction, jnp.where(self.offload, -1, listed)


class HalfOfTheQueries(Reading):
  def num_queries(self, length):
    return length / 2


@dataclasses.dataclass(frozen=True)
class ReadingQueries(Reading):
  """Reads queries in its index, which `Flat` does not."""

  how: str = "sum"

  def index(self, prompt, budget):
    queries = prompt.head.queries
    if self.how == "last":
      return queries[:, -1]
    return getattr(jnp, self.how)(queries, axis=1)

  def retrieve(self, index, queries, store, budget):
    return Flat.retrieve(self, None, queries + index, store, budget)


NOT_RETRIEVING = {
  "sum of no queries": (ReadingQueries(), r"reads queries .*num_queries"),
  "mean of none": (ReadingQueries(how="mean"), r"reads queries .*None for all"),
  "last of none": (ReadingQueries(how="last"), r"reads queries .*None for all"),
  "half a query": (HalfOfTheQueries(), "a number .* queries, or None"),
  "ranks otherwise": (RankingOthers(local=8), "make `ranking` and `update_of`"),
  "learns otherwise": (LearningOthers(local=8), "With offload=true"),
  "too few": (TooFewCandidates(local=8), "names 3 candidates; name .* or more"),
  "out of range": (BeyondTheStore(), "retrieves slot .* that are stored"),
  "twice": (Twice(), "once in a list"),
  "empty": (EmptyReads(), "holds no token"),
  "no pages": (ScatteredPages(), "whole pages of 2 slots"),
  "cut pages": (CutPages(), "end it within the .* that are stored"),
  "grows": (Growing(), "same shapes"),
  "dense": (
    Reading(dense_layers=tuple(range(64))),
    "leave one to retrieve from",
  ),
}


@pytest.mark.parametrize("case", NOT_RETRIEVING)
def test_a_retrieval_that_breaks_its_word_is_told_so_in_a_sentence(case):
  retrieval, message = NOT_RETRIEVING[case]
  with pytest.raises(kvjax.InputError, match=message) as caught:
    check_retrieval(retrieval)
  assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quest", "quest:offload=true"])
def test_a_retrieval_of_ours_passes(name):
  check_retrieval(kvjax.get_retrieval(name))


def test_empty_slots_of_stored_keys_on_the_host_are_poisoned_there():
  model = TinyModel()
  rows = [[*range(40)], [*range(9)]]
  plan = kvjax.get_plan("flat:sinks=1:local=2:offload=true", 6)
  cache, _ = kvjax.prefill(model, model.init(), kvjax.Prompts.of(rows), plan)
  poisoned = poison_cache(cache)
  assert poisoned.nbytes_by_memory == cache.nbytes_by_memory
  stored, spoiled = (c.layer(0).stored for c in (cache, poisoned))
  valid = np.asarray(stored.positions >= 0)
  assert not valid.all()
  np.testing.assert_array_equal(
    np.asarray(spoiled.keys),
    np.where(valid[..., None], np.asarray(stored.keys), np.nan),
  )
