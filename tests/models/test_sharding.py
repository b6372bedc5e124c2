"""Weights and caches on a mesh of four devices answer as on one."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from kvjax.cache.sharding import parse_mesh, split_mesh
from kvjax.errors import InputError
from kvjax.kernels.compiled.collectives import collectives
from kvjax.kernels.compiled.hlo import Module
from kvjax.models.pretrained import load_decoder
from kvjax.models.rope import Rope
from kvjax.testing import kept_positions

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"


def run(mesh=None):
  rows = [list(range(1, n)) for n in (40, 23, 31, 35)]
  questions = kvjax.Prompts.of([[5, 6, 7]] * 4)
  model, params = load_decoder(GOLDEN / "qwen25", "float32", mesh)
  cache, logits = kvjax.prefill(
    model,
    params,
    kvjax.Prompts.of(rows),
    kvjax.Plan(kvjax.get_method("snapkv:window=4"), kvjax.Retention(0.5)),
  )
  answers = kvjax.generate(model, params, cache, questions, kvjax.Decoding(5))
  return model, params, cache, logits, answers.rows()


@pytest.fixture(scope="module")
def alone():
  return run()


@pytest.mark.parametrize("mesh", ["data:2,model:2", "model:4", "data:4"])
def test_a_sharded_model_answers_as_a_whole_one(alone, mesh):
  model, _, cache, logits, answers = alone
  devices = parse_mesh(mesh)
  with jax.set_mesh(devices):
    _, params, spread, spread_logits, spread_answers = run(devices)
  # Each device holds its part of the weights and of the cache only.
  up = params["layers"][0]["mlp"]["up_proj"]["kernel"][...]
  assert up.addressable_shards[0].data.shape[2] == (
    up.shape[2] // devices.shape["model"]
  )
  (stack,) = spread.stacks
  # Two KV heads on four devices are in pages.
  keys = stack.pages.keys if mesh == "model:4" else stack.keys
  assert keys.addressable_shards[0].data.shape[:3] == (
    model.geometry.num_layers,
    4 // devices.shape["data"],
    keys.shape[2] // devices.shape["model"],
  )
  for row in range(4):
    assert kept_positions(spread, row) == kept_positions(cache, row)
  np.testing.assert_allclose(logits, spread_logits, rtol=0, atol=1e-4)
  assert answers == spread_answers


@pytest.mark.parametrize("mesh", ["data:2,model:2", "model:4"])
def test_rows_alone_are_answered_as_together(alone, mesh, rows_alone):
  _, _, cache, logits, answers = alone
  devices = parse_mesh(mesh)
  with rows_alone(), jax.set_mesh(devices):
    _, _, by_row, found, found_answers = run(devices)
  for row in range(4):
    assert kept_positions(by_row, row) == kept_positions(cache, row)
  np.testing.assert_allclose(found, logits, rtol=0, atol=1e-4)
  assert found_answers == answers


def test_a_split_axis_shares_out_all_weights_but_those_of_kv_heads(alone):
  """Four devices, of which two have the same of two KV heads."""
  _, _, cache, logits, answers = alone
  devices = split_mesh(parse_mesh("model:4"), 2)
  with jax.set_mesh(devices):
    _, params, spread, spread_logits, spread_answers = run(devices)
  layer = params["layers"][0]
  for name, parts in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
    kernel = layer["self_attn"][name]["kernel"][...]
    here = kernel.addressable_shards[0].data.shape
    assert here[-1] == kernel.shape[-1] // parts
  rows = layer["self_attn"]["o_proj"]["kernel"][...]
  assert rows.addressable_shards[0].data.shape[1] == rows.shape[1] // 4
  up = layer["mlp"]["up_proj"]["kernel"][...]
  assert up.addressable_shards[0].data.shape[2] == up.shape[2] // 4
  for row in range(4):
    assert kept_positions(spread, row) == kept_positions(cache, row)
  # The two devices of a head share out its tokens in pages.
  pages = spread.stacks[0].pages.keys
  assert pages.addressable_shards[0].data.shape[2] == pages.shape[2] // 4
  np.testing.assert_allclose(logits, spread_logits, rtol=0, atol=1e-4)
  assert answers == spread_answers


def test_heads_that_do_not_divide_stay_whole():
  mesh = parse_mesh("model:4")
  model, params = load_decoder(GOLDEN / "qwen25", "float32", mesh)
  kernel = params["layers"][0]["self_attn"]["k_proj"]["kernel"][...]
  divides = model.geometry.layers[0].kv_heads % 4 == 0
  expected = PartitionSpec(None, None, "model" if divides else None)
  assert kernel.sharding.spec == expected


def test_keys_turn_where_their_heads_are():
  """Each device has one head of both rows, and sends nothing."""
  mesh = parse_mesh("model:4")
  own = NamedSharding(mesh, PartitionSpec("data", "model"))
  keys = jax.ShapeDtypeStruct((2, 4, 16, 8), jnp.float32, sharding=own)
  by = jax.ShapeDtypeStruct((2, 4, 16), jnp.int32, sharding=own)
  compiled = jax.jit(Rope("default", 1e4, 8, 64).rerotate).lower(keys, by)
  compiled = compiled.compile()
  assert compiled.output_shardings.spec == own.spec
  assert collectives(Module.of(compiled.as_text())) == []


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("data=2", "data:2,model:2"),
    ("rows:2", "'rows:2' does not fit"),
    ("data:0", "'data:0' does not fit"),
    ("data:4,model:2", "needs 8 devices; there are 4"),
  ],
)
def test_a_wrong_mesh_is_explained(text, said):
  with pytest.raises(InputError, match=said):
    parse_mesh(text)
