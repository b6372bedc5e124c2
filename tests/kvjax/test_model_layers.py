"""Models whose specs, weights or blocks contradict one another are refused."""

import dataclasses

import pytest

import kvjax
from kvjax.model import LayerSpec
from kvjax.testing import TinyModel

WINDOW = 6
LOCAL = LayerSpec(4, 2, 8, window=WINDOW)
PROMPTS = kvjax.Prompts.of([list(range(21)), list(range(13))])
DECODING = kvjax.Decoding(max_new_tokens=12)


def test_a_spec_that_does_not_fit_is_refused():
  with pytest.raises(kvjax.InputError, match="multiple of the KV heads"):
    LayerSpec(4, 3, 8)
  wrong = {"window": 0, "value_dim": 0, "kv_heads": -1, "weights": -1}
  for name, value in wrong.items():
    with pytest.raises(
      kvjax.InputError, match=f"{name} of a layer must be .*; {value} is not"
    ):
      LayerSpec(**{"heads": 4, "kv_heads": 2, "key_dim": 8, name: value})
  no_cache = LayerSpec(1, 1, 1, cache=False)
  for none in ((), (no_cache,)):
    with pytest.raises(kvjax.InputError, match="one layer that has a cache"):
      kvjax.Geometry(none, 64)


def test_sinks_are_where_the_spec_has_them():
  silent = LayerSpec(4, 2, 8)
  said = dataclasses.replace(silent, sinks=True)

  class Unsaid(TinyModel):
    def block(self, weights, spec, *rest):
      return super().block(weights, said, *rest)

  params = TinyModel(kvjax.Geometry((said,), 64)).init()
  with pytest.raises(
    kvjax.InputError, match="has some, and its spec says none"
  ):
    kvjax.prefill(
      Unsaid(kvjax.Geometry((silent,), 64)),
      params,
      PROMPTS,
      kvjax.get_plan("full", kvjax.Retention(1.0)),
    )


class NeverAttends(TinyModel):
  def block(self, weights, spec, hidden, *rest):
    return hidden, None


class AttendsTwice(TinyModel):
  def block(self, *arguments):
    super().block(*arguments)
    return super().block(*arguments)


class DropsState(TinyModel):
  def block(self, *arguments):
    return super().block(*arguments)[0], None


class ReturnsOne(TinyModel):
  def block(self, *arguments):
    return super().block(*arguments)[0]


@pytest.mark.parametrize("block", [None, 8])
@pytest.mark.parametrize(
  "kind", [NeverAttends, AttendsTwice, DropsState, ReturnsOne]
)
def test_a_block_attends_once_and_returns_its_state(kind, block):
  model = kind(kvjax.Geometry.uniform(1, 4, 2, 8, 64))
  plan = kvjax.get_plan(
    "keydiff", kvjax.Tokens(4), schedule=kvjax.Schedule(block=block)
  )
  with pytest.raises(kvjax.InputError, match=f"once; that of {kind.__name__}"):
    kvjax.prefill(model, model.init(), PROMPTS, plan)


def test_weights_of_layers_are_a_tuple_of_stacks():
  class Loose(TinyModel):
    def layer_weights(self, params):
      return params["layers"][0]

  model = Loose(kvjax.Geometry.uniform(1, 4, 2, 8, 64))
  plan = kvjax.get_plan("full", kvjax.Retention(1.0))
  with pytest.raises(kvjax.InputError, match="Loose returns a dict"):
    kvjax.prefill(model, model.init(), PROMPTS, plan)


def test_tokens_beside_those_of_windows_keep_their_numbers():
  model = TinyModel(kvjax.Geometry((LOCAL, LayerSpec(4, 2, 8)), 64))
  for name in ("rerotate/keydiff", "streaming:rerotate=true"):
    with pytest.raises(
      kvjax.InputError, match="layers with a window keep other"
    ):
      kvjax.prefill(
        model, model.init(), PROMPTS, kvjax.get_plan(name, kvjax.Tokens(4))
      )


def test_a_selection_is_shared_by_layers_with_as_many_heads():
  few = LayerSpec(4, 2, 8)
  many = dataclasses.replace(few, kv_heads=4, weights=1)
  model = TinyModel(kvjax.Geometry((few, many), 64))
  plan = kvjax.get_plan("chunkkv:window=4:layer_reuse=2", kvjax.Tokens(8))
  with pytest.raises(kvjax.InputError, match="layer 0 in layer 1"):
    kvjax.prefill(model, model.init(), PROMPTS, plan)


def test_a_model_of_windows_alone_has_no_budget_to_spread():
  model = TinyModel(kvjax.Geometry((LOCAL, LOCAL), 64))
  for name in ("pyramid/keydiff", "pyramidkv.kvpress", "ada/keydiff"):
    plan = kvjax.get_plan(name, kvjax.Tokens(4))
    with pytest.warns(kvjax.InputWarning, match="compresses nothing"):
      cache, _ = kvjax.prefill(model, model.init(), PROMPTS, plan)
    assert int(cache.lengths.max()) == 6


def test_a_cache_is_of_the_model_that_made_it():
  uniform = kvjax.Geometry.uniform
  one, deeper, wider = (
    TinyModel(uniform(layers, 4, kv_heads, 8, 64))
    for layers, kv_heads in ((1, 2), (2, 2), (1, 1))
  )
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(4))
  cache, logits = kvjax.prefill(one, one.init(), PROMPTS, plan)
  for other, said in (
    (deeper, "1 layers and the model 2"),
    (wider, "and 1 KV heads of"),
  ):
    with pytest.raises(kvjax.InputError, match=said):
      kvjax.generate(other, other.init(), cache, logits, DECODING)


@pytest.mark.parametrize("block", [None, 8])
def test_a_layer_without_a_cache_that_attends_is_refused(block):
  @dataclasses.dataclass(frozen=True)
  class Attends(TinyModel):
    def block(self, weights, spec, *rest):
      spec = dataclasses.replace(spec, cache=True)
      return super().block(weights, spec, *rest)

  spec = LayerSpec(4, 2, 8)
  geometry = kvjax.Geometry((spec, dataclasses.replace(spec, cache=False)), 64)
  params = TinyModel(kvjax.Geometry((spec, spec), 64)).init()
  plan = kvjax.get_plan(
    "keydiff", kvjax.Tokens(4), schedule=kvjax.Schedule(block=block)
  )
  with pytest.raises(kvjax.InputError, match="must not call attend"):
    kvjax.prefill(Attends(geometry), params, PROMPTS, plan)
