"""A prefill holds the prompt's queries only for those who read them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.engine import prompt_programs
from kvjax.engine.prompt_programs import QUERIES
from kvjax.methods import HeadwiseMethod, Traits
from kvjax.registry.registry import METHODS
from kvjax.testing import TinyModel, check_method

MODEL = TinyModel()
PARAMS = MODEL.init()
LENGTH = 40
PROMPTS = kvjax.Prompts.of([list(range(LENGTH)), list(range(9, 40))], LENGTH)
BUDGET = kvjax.Retention(0.5)


def plan_of(name):
  return kvjax.get_plan(name, 1.0 if name == "full" else BUDGET)


# The files of gates have models of their own.
BLIND = [
  name
  for name in METHODS
  if name not in ("kvzap", "fast_kvzip")
  and not plan_of(name).method.traits.queries
]
LATER = kvjax.get_plan("snapkv:window=4", 12, schedule=kvjax.Schedule(every=4))
PLANS = {
  "keydiff": (False, [plan_of("keydiff")]),
  "full": (False, [plan_of("full")]),
  "a replay": (False, [plan_of("kvzip:chunk=16:overlap=4")]),
  "snapkv": (True, [plan_of("snapkv:window=4")]),
  "one of two": (True, [plan_of("keydiff"), plan_of("tova")]),
  "while decoding": (True, [kvjax.get_plan("keydiff", 12, decoding=LATER)]),
  "an index": (True, [kvjax.get_plan("quest", 0.25)]),
  "channels": (True, [plan_of("think/keydiff")]),
  "chunks": (True, [plan_of("chunked/keydiff:length=8")]),
}


@dataclasses.dataclass(frozen=True)
class Denied(HeadwiseMethod):
  """Says that it reads no queries, and scores by their sum or their last."""

  last: bool = False

  @property
  def traits(self):
    return Traits(queries=False, whole_prompts_only="it reads all queries")

  def score_head(self, head):
    queries = head.queries.astype("float32").sum(0)
    queries = jnp.where(head.query_positions[:, None] >= 0, queries, 0.0)
    query = queries[-1] if self.last else queries.sum(0)
    return head.keys @ query


@pytest.mark.parametrize("case", PLANS)
def test_layers_return_queries_if_anybody_reads_them(case, monkeypatch):
  read, plans = PLANS[case]
  lengths, forward = [], prompt_programs.forward_layers

  def noted(*given):
    for hidden, activations in forward(*given):
      lengths.append(activations.queries.shape[2])
      yield hidden, activations

  monkeypatch.setattr(prompt_programs, "forward_layers", noted)
  kvjax.sweep(MODEL, PARAMS, PROMPTS, plans)
  first = lengths[: len(MODEL.geometry.layers)]
  assert set(first) == {LENGTH if read else 0}


def test_a_layer_without_queries_returns_as_many_bytes_less():
  spec, shape = MODEL.geometry.layers[0], (2, LENGTH)
  given = jax.ShapeDtypeStruct(shape, jnp.int32)
  (stack,) = MODEL.layer_weights(PARAMS)[:1]

  def nbytes(optional):
    lowered = prompt_programs.forward_layer.lower(
      stack,
      jax.ShapeDtypeStruct((), jnp.int32),
      *jax.eval_shape(MODEL.embed, PARAMS, given, given),
      given,
      model=MODEL,
      how=(spec, frozenset(optional)),
    )
    return lowered.compile().memory_analysis().output_size_in_bytes

  queries = 4 * 2 * spec.heads * LENGTH * spec.key_dim
  # An array without elements has a place in the tuple of results, too.
  assert abs(nbytes({QUERIES}) - nbytes({}) - queries) <= 64


@pytest.mark.parametrize("name", BLIND)
def test_methods_keep_the_same_whether_others_read_queries_or_not(name):
  plan, reader = plan_of(name), plan_of("snapkv:window=4")
  (alone,), _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, [plan])
  (beside, _), _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, [plan, reader])
  jax.tree.map(np.testing.assert_array_equal, alone, beside)


def test_there_are_methods_of_both_kinds():
  assert {"keydiff", "lagkv", "streaming", "kvzip", "full"} <= {*BLIND}
  assert not {"snapkv", "h2o", "compactor", "protokv"} & {*BLIND}


@pytest.mark.parametrize("last", [False, True])
def test_a_method_that_denies_what_it_reads_is_told_so(last):
  with pytest.raises(
    kvjax.InputError, match=r"reads the prompt's queries.*queries=False"
  ) as caught:
    check_method(Denied(last))
  assert "\n" not in str(caught.value)
