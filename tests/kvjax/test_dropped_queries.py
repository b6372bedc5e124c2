"""A prefill holds the prompt's queries only for those who read them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.cache.sparse import SparseLayer
from kvjax.engine import prompt_programs, sweeping
from kvjax.methods import HeadwiseMethod, Traits
from kvjax.methods.last_queries import window_queries
from kvjax.registry.registry import METHODS
from kvjax.retrieval import Selection
from kvjax.retrieval.clusters import ClusterRetrieval
from kvjax.retrieval.quest import Paged
from kvjax.retrieval.sparse_attention import SparseAttention
from kvjax.testing import TinyModel, check_method, random_activations

MODEL = TinyModel()
PARAMS = MODEL.init()
LENGTH = 40
PROMPTS = kvjax.Prompts.of([list(range(LENGTH)), list(range(9, 40))], LENGTH)
BUDGET = kvjax.Retention(0.5)


def plan_of(name):
  return kvjax.get_plan(name, 1.0 if name == "full" else BUDGET)


# The files of gates have models of their own.
SOME = [
  name
  for name in METHODS
  if name not in ("kvzap", "fast_kvzip")
  and plan_of(name).method.traits.queries is not None
]
LATER = kvjax.get_plan("snapkv:window=4", 12, schedule=kvjax.Schedule(every=4))
# How many queries a prefill holds, of rows of 40 tokens.
PLANS = {
  "keydiff": (0, [plan_of("keydiff")]),
  "full": (0, [plan_of("full")]),
  "a replay": (0, [plan_of("kvzip:chunk=16:overlap=4")]),
  "snapkv": (8, [plan_of("snapkv:window=4")]),
  "a wider window": (16, [plan_of("tova"), plan_of("snapkv:window=9")]),
  "one of two": (8, [plan_of("keydiff"), plan_of("tova")]),
  "another's scores": (8, [plan_of("criticalkv:window=4")]),
  "while decoding": (8, [kvjax.get_plan("keydiff", 12, decoding=LATER)]),
  "all queries": (LENGTH, [plan_of("h2o"), plan_of("tova")]),
  "an index of keys": (8, [kvjax.get_plan("quest", 0.25)]),
  "an index of queries": (16, [kvjax.get_plan("ctkvr:centroids=9", 0.25)]),
  "an index of the first": (
    LENGTH,
    [kvjax.get_plan("ctkvr:choice=init", 0.25)],
  ),
  "a ring of queries": (16, [kvjax.get_plan("squeezed:window=12", 0.25)]),
  "channels": (16, [plan_of("think/keydiff:window=9")]),
  "chunks": (LENGTH, [plan_of("chunked/snapkv:window=4:length=8")]),
  "chunks without": (0, [plan_of("chunked/keydiff:length=8")]),
  "chunks without, then others": (
    8,
    [kvjax.get_plan("chunked/keydiff:length=8", 12, decoding=LATER)],
  ),
}


@dataclasses.dataclass(frozen=True)
class Denied(HeadwiseMethod):
  """Says that it reads a few queries, and scores by all or some of them."""

  says: int
  last: int | None = None

  @property
  def traits(self):
    return Traits(queries=self.says, whole_prompts_only="it reads queries")

  def score_head(self, head):
    queries, places = (
      head.queries.astype("float32").sum(0),
      head.query_positions,
    )
    first = 0
    if self.last is not None:
      first = jnp.maximum(jnp.max(places, initial=-1) + 1 - self.last, 0)
    queries = jnp.where((places >= first)[:, None], queries, 0.0)
    return head.keys @ queries.sum(0)


@pytest.mark.parametrize("case", PLANS)
def test_layers_return_the_queries_that_are_read(case, monkeypatch):
  read, plans = PLANS[case]
  monkeypatch.setattr(sweeping, "_QUERIES", 8)
  lengths, forward = [], prompt_programs.forward_layers

  def noted(*given):
    for hidden, activations in forward(*given):
      lengths.append(activations.queries.shape[2])
      yield hidden, activations

  monkeypatch.setattr(prompt_programs, "forward_layers", noted)
  kvjax.sweep(MODEL, PARAMS, PROMPTS, plans)
  first = lengths[: len(MODEL.geometry.layers)]
  assert set(first) == {read}


@pytest.mark.parametrize("count", [0, 8])
def test_a_layer_with_fewer_queries_returns_as_many_bytes_less(count):
  spec, shape = MODEL.geometry.layers[0], (2, LENGTH)
  given = jax.ShapeDtypeStruct(shape, jnp.int32)
  (stack,) = MODEL.layer_weights(PARAMS)[:1]

  def nbytes(queries):
    lowered = prompt_programs.forward_layer.lower(
      stack,
      jax.ShapeDtypeStruct((), jnp.int32),
      *jax.eval_shape(MODEL.embed, PARAMS, given, given),
      given,
      model=MODEL,
      how=(spec, frozenset(), queries),
    )
    return lowered.compile().memory_analysis().output_size_in_bytes

  dropped = 4 * 2 * spec.heads * (LENGTH - count) * spec.key_dim
  # An array without elements has a place in the tuple of results, too.
  assert abs(nbytes(None) - nbytes(count) - dropped) <= 64


@pytest.mark.parametrize("name", SOME)
def test_methods_keep_the_same_beside_one_that_reads_all(name, monkeypatch):
  monkeypatch.setattr(sweeping, "_QUERIES", 1)
  plan, reader = plan_of(name), plan_of("h2o")
  (alone,), _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, [plan])
  (beside, _), _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, [plan, reader])
  jax.tree.map(np.testing.assert_array_equal, alone, beside)


# Small enough for rows of 40 and 31 tokens to leave much to retrieve from.
@pytest.mark.parametrize(
  "name",
  [
    "ctkvr:sinks=2:local=5",
    "ctkvr:sinks=2:local=5:centroids=9:causal=true",
    "ctkvr:sinks=2:local=5:centroids=36",
    "ctkvr:sinks=2:local=5:choice=init",
    "ctkvr:sinks=2:local=5:max_resident=9",
    "flat:sinks=2:local=5",
    "quest:dense_layers=:page=4",
    "magicpig:sinks=2:local=5:bits=3:tables=12:dense_every=0",
    "clusterkv:sinks=2:clusters=7:iterations=3:dense_layers=",
    "squeezed:local=5:window=12:clusters=7:iterations=3",
    "squeezed:local=5:window=50:clusters=7:iterations=3",
  ],
)
def test_indices_are_the_same_beside_one_that_reads_all(name, monkeypatch):
  monkeypatch.setattr(sweeping, "_QUERIES", 1)
  plan, reader = kvjax.get_plan(name, 0.25), plan_of("h2o")
  (alone,), _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, [plan])
  (beside, _), _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, [plan, reader])
  assert any(isinstance(layer, SparseLayer) for layer in alone.layers)
  jax.tree.map(np.testing.assert_array_equal, alone, beside)


@pytest.mark.parametrize("base", [Paged, ClusterRetrieval])
def test_an_index_of_its_own_reads_all_queries_unless_it_says(
  base, monkeypatch
):
  monkeypatch.setattr(sweeping, "_QUERIES", 8)

  @dataclasses.dataclass(frozen=True)
  class Reader(base):
    def index(self, prompt, budget):
      return prompt.head.queries

    def retrieve(self, index, queries, store, budget):
      return Selection(store.list_all(budget.max_keys)[None]), None

  sparse = SparseAttention(Reader(local=1), kvjax.Tokens(4))
  plan = kvjax.Plan(kvjax.get_method("full"), 1.0, sparse=sparse)
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  assert {x.index.shape[-2] for x in cache.layers} == {LENGTH}


def test_a_gradient_does_not_depend_on_how_many_queries_are_held(monkeypatch):
  monkeypatch.setattr(sweeping, "_QUERIES", 8)

  def slopes(name):
    def loss(params):
      logits = kvjax.prefill(MODEL, params, PROMPTS, plan_of(name))[1]
      return jnp.sum(jnp.sin(logits))

    return jax.grad(loss)(PARAMS)

  same = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(same, slopes("snapkv:window=4"), slopes("h2o"))


def test_there_are_methods_of_all_kinds():
  blind = {name for name in SOME if not plan_of(name).method.traits.queries}
  assert {"keydiff", "lagkv", "streaming", "kvzip", "full"} <= blind
  assert {"snapkv", "tova", "protokv", "criticalkv"} <= {*SOME} - blind
  assert not {"h2o", "compactor", "expected_attention"} & {*SOME}


@pytest.mark.parametrize(
  "method", [Denied(0), Denied(0, 1), Denied(3), Denied(3, 4)]
)
def test_a_method_that_denies_what_it_reads_is_told_so(method):
  with pytest.raises(
    kvjax.InputError,
    match=f"reads more of the prompt's queries.*queries={method.says}",
  ) as caught:
    check_method(method)
  assert "\n" not in str(caught.value)


def test_a_method_that_denies_more_queries_than_most_rows_have_is_told_so():
  with pytest.raises(kvjax.InputError, match=r"queries=100"):
    check_method(Denied(100))


def test_a_method_may_read_the_last_queries_alone():
  check_method(Denied(3, 3))


def test_the_last_queries_are_those_of_every_row():
  seen = random_activations(4, [9, 5, 2], 9)
  few = seen.with_queries(5).with_queries(3)
  assert few.query_positions.tolist() == [[6, 7, 8], [2, 3, 4], [0, 1, -1]]
  for row, last in enumerate((9, 5)):
    np.testing.assert_array_equal(
      few.queries[row], seen.queries[row, :, last - 3 : last]
    )
  np.testing.assert_array_equal(few.queries[2, :, :2], seen.queries[2, :, :2])
  assert seen.with_queries(9) is seen is seen.with_queries(None)
  with pytest.raises(kvjax.InputError, match="3 of this prompt's are left"):
    window_queries(LayerCache.of(few), few, 4)
