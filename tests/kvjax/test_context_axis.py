"""Prompts whose tokens are shared out over the axis "context" of a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from mesh_answers import answered, assert_same
from processes import call_with_devices

import kvjax
from kvjax.cache.packed import PackedLayer
from kvjax.cache.sharding import parse_mesh
from kvjax.engine import prompt_programs
from kvjax.engine.compress import Evaluation, evaluate_layer
from kvjax.errors import InputError, InputWarning
from kvjax.kernels.attention import chunked
from kvjax.kernels.compiled.collectives import collectives
from kvjax.kernels.compiled.hlo import Module
from kvjax.model import Geometry, LayerSpec
from kvjax.testing import TinyModel

RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (61, 43)]
# Of two KV heads, the devices of the last mesh have one each; on the others,
# there are more devices for a row than heads.
MESHES = ("context:4", "context:2,model:2", "data:2,context:2")
HALF = kvjax.Retention(0.5)
PLANS = {
  "full": kvjax.get_plan("full", kvjax.Retention(1.0)),
  "keydiff": kvjax.get_plan("keydiff", HALF),
  "snapkv": kvjax.get_plan("snapkv:window=5", HALF),
  "lagkv": kvjax.get_plan("lagkv:sinks=2:lag=10", HALF),
  "compactor": kvjax.get_plan("compactor:chunk=16", HALF),
  "straddling": kvjax.get_plan("compactor:chunk=13", HALF),
  "tova": kvjax.get_plan("tova", HALF),
  "protokv": kvjax.get_plan("protokv:window=5:tokens_per_prototype=4", HALF),
  "ada/snapkv": kvjax.get_plan("ada/snapkv:window=5", HALF),
  "h2o": kvjax.get_plan("h2o", HALF),
  "int8": kvjax.get_plan("keydiff", HALF, kv_dtype="int8"),
  "per query head": kvjax.get_plan("keydiff", HALF, per_query_head=True),
}
# What is not kept in pages, or is not compressed while the prompt is read.
WHOLE = {
  "kvzip": kvjax.get_plan("kvzip:chunk=32", HALF),
  "gradients": kvjax.get_plan("kvzip.grad:chunk=32:level=head", HALF),
  **{
    f"evicting {name}": kvjax.get_plan(
      name, kvjax.Tokens(24), schedule=kvjax.Schedule(every=4)
    )
    for name in ("snapkv:window=5", "tova", "dropkv:window=4", "rkv:window=4")
  },
  "renumbered": kvjax.get_plan("streaming:rerotate=true", kvjax.Tokens(24)),
  "channels": kvjax.get_plan("think:window=5/snapkv:window=4", HALF),
  "ctkvr": kvjax.get_plan("ctkvr:sinks=2:local=5:probes=2", kvjax.Tokens(8)),
  "quest": kvjax.get_plan("quest:dense_layers=", kvjax.Tokens(16)),
}
LOCAL = LayerSpec(4, 2, 8, window=6, sinks=True, weights=0)
GLOBAL = LayerSpec(
  6, 3, 4, value_dim=10, scale=0.4, softcap=2.0, sinks=True, weights=1
)
MODELS = {
  "uniform": TinyModel(),
  "hybrid": TinyModel(Geometry((LOCAL, GLOBAL, LOCAL, GLOBAL), 512)),
}


@functools.cache
def answers(name, mesh=None, kind="uniform"):
  return answered(MODELS[kind], {**PLANS, **WHOLE}[name], ROWS, mesh)


def assert_answers(name, mesh, kind="uniform"):
  assert_same(answers(name, None, kind), answers(name, mesh, kind))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PLANS)
def test_a_shared_out_prompt_answers_as_on_one_device(name, mesh):
  assert_answers(name, mesh)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_windows_sinks_and_softcaps_know_their_neighbors(name, mesh):
  assert_answers(name, mesh, "hybrid")


@pytest.mark.filterwarnings("ignore:The .* devices of the axis 'context'")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", WHOLE)
def test_what_pages_cannot_hold_answers_as_on_one_device(name, mesh):
  assert_answers(name, mesh)


def share(array):
  return array.addressable_shards[0].data.nbytes / array.nbytes


@pytest.mark.parametrize("name", ["full", "keydiff"])
def test_devices_share_out_heads_or_pages_of_any_heads(name):
  for mesh in MESHES:
    (stack,) = answers(name, mesh)[0].stacks
    in_pages = isinstance(stack, PackedLayer)
    assert in_pages == (mesh != "data:2,context:2")
    kept = stack.pages if in_pages else stack
    assert share(kept.keys) == share(kept.values) == 1 / 4


@pytest.mark.filterwarnings("ignore:The .* devices of the axis 'context'")
@pytest.mark.parametrize(
  ("mesh", "heads", "rows"), [*zip(MESHES, (1, 2, 1), (1, 1, 2), strict=True)]
)
def test_queries_to_score_by_are_where_the_weights_compute_them(
  mesh, heads, rows
):
  window = answers("evicting dropkv:window=4", mesh)[0].stacks[0].window
  assert share(window.queries) == 1 / (heads * rows)
  # Not shared out by queries, though each is one of four.
  assert share(window.positions) == 1 / rows


def test_a_warning_says_that_devices_have_the_same_cache():
  with (
    jax.set_mesh(parse_mesh("context:4")),
    pytest.warns(
      InputWarning, match="2 KV heads cannot be shared out over"
    ) as w,
  ):
    answers.__wrapped__("quest")
  # Keys and values of 2 heads in 2 layers, in full instead of a quarter.
  spec = TinyModel().geometry.layers[0]
  token = 2 * 2 * (spec.key_dim + spec.value_width) * 4
  assert len(TinyModel().geometry.layers) == 2
  (message,) = {str(each.message) for each in w}
  assert f"about {token - token // 4} bytes more per cached token." in message


def test_blocks_are_refused():
  plan = kvjax.get_plan("keydiff", HALF, schedule=kvjax.Schedule(block=16))
  model, prompts = TinyModel(), kvjax.Prompts.of(ROWS)
  with (
    jax.set_mesh(parse_mesh("context:4")),
    pytest.raises(InputError, match="whole prompts, and these come in blocks"),
  ):
    kvjax.prefill(model, model.init(), prompts, plan)


def test_a_prompt_that_the_axis_does_not_divide_is_refused():
  model, prompts = TinyModel(), kvjax.Prompts.of(ROWS, padded=62)
  with (
    jax.set_mesh(parse_mesh("context:4")),
    pytest.raises(InputError, match="4 devices, which do not divide the 62 to"),
  ):
    kvjax.prefill(model, model.init(), prompts, PLANS["keydiff"])


def test_the_axis_is_between_those_of_rows_and_heads():
  mesh = parse_mesh("model:2,context:2")
  assert dict(mesh.shape) == {"data": 1, "context": 2, "model": 2}
  assert mesh.axis_names == ("data", "context", "model")
  assert parse_mesh("model:4,context:1").axis_names == ("data", "model")


# A prompt whose keys are much larger than one number for each of them.
LONG, WIDE = 4096, TinyModel(Geometry.uniform(2, 8, 4, 16, 8192))
NUMBERS = 2 * 4 * LONG  # of two rows with four KV heads


def placed(shapes, shardings):
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    shapes,
    shardings,
  )


def compiled_layer(mesh, plan, model=WIDE):
  """The forward pass and the scores of a layer of a long prompt, compiled."""
  devices = parse_mesh(mesh)
  whole = NamedSharding(devices, PartitionSpec())
  spec = model.geometry.layers[0]
  traits = plan.method.traits
  how = (spec, traits.activations, traits.queries)

  def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=whole)

  with jax.set_mesh(devices):
    params = jax.eval_shape(model.init)
    params = placed(params, jax.tree.map(lambda _: whole, params))
    tokens, index = shape(jnp.int32, 2, LONG), shape(jnp.int32)
    lowered = prompt_programs.embed.lower(model, params, tokens, tokens)
    embedded = placed(lowered.out_info, lowered.compile().output_shardings)
    lowered = prompt_programs.forward_layer.lower(
      model.layer_weights(params)[0],
      index,
      *embedded,
      tokens,
      model=model,
      how=how,
    )
    forward = lowered.compile()
    (_, activations) = placed(lowered.out_info, forward.output_shardings)
    evaluation = Evaluation.of(plan)

    def score(layer, activations):
      needed = activations.only(traits.activations)
      return evaluate_layer(evaluation, layer, needed)

    scoring = jax.jit(score).lower(index, activations).compile()
  return forward, scoring


@pytest.mark.parametrize("name", ["keydiff", "snapkv", "tova"])
def test_scores_are_computed_where_the_keys_are(name):
  """Devices tell each other numbers of tokens and sums, but no keys."""
  _, scoring = compiled_layer("context:2,model:2", PLANS[name])
  found = collectives(Module.of(scoring.as_text()))
  assert found
  # A float for each token of the KV heads of a device.
  assert max(each.largest for each in found) <= 4 * NUMBERS // 2


def test_each_device_attends_with_its_queries_alone(monkeypatch):
  monkeypatch.setattr(chunked, "LOGITS", 2**12)
  forward, _ = compiled_layer("context:4", PLANS["keydiff"])
  moved = {
    (each.opcode, each.largest)
    for each in collectives(Module.of(forward.as_text()))
  }
  # Keys and values of the layer, which all devices attend to, and halves of a
  # device's queries; there are twice as many heads of these.
  halves = 2 * 4 * NUMBERS * 16 // (2 * 4)
  assert moved == {
    ("all-gather", 4 * NUMBERS * 16),
    ("collective-permute", halves),
  }
  alone, _ = compiled_layer("context:1", PLANS["keydiff"])
  sizes = [
    each.memory_analysis().temp_size_in_bytes for each in (forward, alone)
  ]
  # Keys and values; queries and outputs of this device on their way.
  received = 2 * 4 * NUMBERS * 16 + 2 * 2 * halves
  assert sizes[0] - received < 0.3 * sizes[1]


def test_devices_of_a_window_receive_what_it_sees_of_their_neighbors():
  """Half of a device's tokens, and as many queries as on one device."""
  window = LayerSpec(8, 4, 16, window=LONG // 8 + 1)
  model = TinyModel(Geometry((window,) * 2, 8192))
  forward, _ = compiled_layer("context:4", PLANS["keydiff"], model)
  moved = collectives(Module.of(forward.as_text()))
  assert {(each.opcode, each.largest) for each in moved} == {
    ("collective-permute", 4 * NUMBERS * 16 // 8)
  }
  assert len(moved) == 2  # keys and values


MESHES_OF_EIGHT = ("context:8", "data:2,context:2,model:2", "context:4,model:2")


def compare(name):
  """Runs on eight devices."""
  assert len(jax.devices()) == 8
  for mesh in MESHES_OF_EIGHT:
    assert_answers(name, mesh)
  return name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "keydiff", "ada/snapkv"])
def test_eight_devices_answer_as_one(name):
  assert call_with_devices(8, compare, name) == name
