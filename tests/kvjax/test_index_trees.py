"""The index of a retrieval method may be any tree of arrays."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.registry.registry import RETRIEVALS
from kvjax.retrieval import Retrieval, Selection, best_slots
from kvjax.testing import TinyModel

MODEL = TinyModel()
PARAMS = MODEL.init()
PROMPTS = kvjax.Prompts.of([[*range(1, 30)], [*range(20, 40)]])
QUESTIONS = kvjax.Prompts.of([[7, 3], [8]])


class Named(typing.NamedTuple):
  channel: jax.Array
  count: jax.Array


TREES = {
  "dict": lambda channel, count: {"a": channel, "a/b.c": count},
  "list": lambda channel, count: [channel, count],
  "nested": lambda channel, count: ({"x": [channel], "none": None}, count),
  "named": Named,
}


@dataclasses.dataclass(frozen=True)
class OneChannel(Retrieval):
  """Ranks keys by their first channel, and counts the tokens that ask."""

  sinks: int = 2
  local: int = 3
  tree: str = "dict"

  def index(self, prompt, budget):
    count = jnp.zeros((), jnp.int32)
    return TREES[self.tree](prompt.stored_keys[..., 0], count)

  def retrieve(self, index, queries, store, budget):
    channel, _ = jax.tree.leaves(index)
    scores = channel * jnp.sum(queries[:, 0])
    return Selection(best_slots(scores, store.valid, budget)[None]), None

  def update_index(self, index, update, real):
    _, count = jax.tree.leaves(index)
    return TREES[self.tree](None, count + real.astype(jnp.int32))


def prefilled(tree):
  sparse = kvjax.SparseAttention(OneChannel(tree=tree), 4)
  plan = kvjax.Plan(kvjax.get_method("full"), 1.0, sparse=sparse)
  return kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)[0]


def answers(cache):
  decoding = kvjax.Decoding(4)
  return kvjax.generate(MODEL, PARAMS, cache, QUESTIONS, decoding).rows()


@pytest.fixture
def registered(monkeypatch):
  monkeypatch.setattr(RETRIEVALS, "_entries", dict(RETRIEVALS._entries))
  kvjax.register("one_channel", OneChannel)


@pytest.mark.parametrize("tree", ["dict", "list", "nested"])
def test_any_tree_decodes_and_is_saved(tree, tmp_path, registered):
  cache = prefilled(tree)
  path = tmp_path / "cache"
  kvjax.save_cache(cache, path, model=MODEL, model_id="tiny")
  loaded = kvjax.load_cache(path, model=MODEL, model_id="tiny")
  assert jax.tree.structure(loaded) == jax.tree.structure(cache)
  assert answers(loaded) == answers(cache) == answers(prefilled("named"))


def test_a_tree_whose_class_no_file_names_is_not_saved(tmp_path, registered):
  cache, path = prefilled("named"), tmp_path / "cache"
  with pytest.raises(kvjax.InputError, match="arrays in tuples, lists and dic"):
    kvjax.save_cache(cache, path, model=MODEL, model_id="tiny")
  assert not list(tmp_path.iterdir())
