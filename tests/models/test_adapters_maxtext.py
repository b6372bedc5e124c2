"""What kvjax makes of checkpoints of MaxText computes the same."""

import json
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from adapted import GOLDEN, assert_same, put, tensors_of
from maxtext_trees import MAXTEXT, maxtext_layer, maxtext_tree

from kvjax.cache.sharding import parse_mesh
from kvjax.errors import InputError
from kvjax.models.adapters import ADAPTERS, from_maxtext
from kvjax.models.adapters.maxtext_names import convert
from kvjax.models.pretrained import load


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("name", MAXTEXT)
def test_trees_of_maxtext_are_the_models_that_they_were_made_of(name, scanned):
  golden = load(GOLDEN / name, "float32")
  tree = maxtext_tree(name, golden.config, scanned)
  # As a state of training has it.
  lm = from_maxtext({"params": {"params": tree}}, golden.config)
  assert_same(lm, golden)


def test_every_family_of_maxtext_is_tried():
  tried = {load(GOLDEN / name).config.model_type for name in MAXTEXT}
  # test_experts_of_maxtext does the last one.
  assert {*tried, "qwen3_moe"} == set(ADAPTERS["MaxText"].families)


def test_experts_of_maxtext(tmp_path):
  """Of Qwen3, with experts in all layers, which are scanned after them."""
  shutil.copytree(GOLDEN / "qwen3_moe_shares", tmp_path / "model")
  golden = load(GOLDEN / "qwen3_moe_shares", "float32")
  config = golden.config
  sparse = [config.kinds[kind].sparse for kind in config.layer_kinds]
  keep = sparse.index(True)
  fields = json.loads((tmp_path / "model" / "config.json").read_text())
  fields |= {"num_hidden_layers": 1, "decoder_sparse_step": 1}
  (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
  path = tmp_path / "model" / "model.safetensors"
  files = safetensors.numpy.load_file(path)
  start = f"model.layers.{keep}."
  kept = {
    name.replace(start, "model.layers.0."): x
    for name, x in files.items()
    if not name.startswith("model.layers.") or name.startswith(start)
  }
  safetensors.numpy.save_file(kept, path, {"format": "pt"})
  golden = load(tmp_path / "model", "float32")
  tensors = tensors_of(tmp_path / "model")
  tree = {}
  put(tree, "token_embedder/embedding", tensors["model.embed_tokens.weight"])
  put(tree, "decoder/decoder_norm/scale", tensors["model.norm.weight"])
  put(tree, "decoder/logits_dense/kernel", tensors["lm_head.weight"])
  layer = maxtext_layer(golden.config, tensors, 0)
  layer["moe_block/gate/kernel"] = tensors["model.layers.0.mlp.gate.weight"]
  for own, name in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
    layer[f"moe_block/{own}"] = np.stack(
      [
        tensors[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"]
        for expert in range(golden.config.experts.count)
      ]
    )
  for path, value in layer.items():
    put(tree, f"decoder/layers/{path}", value[:, None])
  assert_same(from_maxtext(tree, golden.config), golden)


def test_a_checkpoint_of_maxtext_is_read_from_its_folder(tmp_path):
  """Parameters alone: the state of the optimizer stays on the disk."""
  golden = load(GOLDEN / "qwen3", "float32")
  tree = maxtext_tree("qwen3", golden.config, scanned=True)
  # And what training stores besides.
  state = {
    "params": {"params": tree},
    "opt_state": {"mu": np.zeros(3, np.float32)},
    "step": np.int32(7),
  }
  with ocp.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "0" / "items", state)
  for folder in (tmp_path / "0", tmp_path / "0" / "items"):
    assert_same(from_maxtext(folder, golden.config), golden)
  with pytest.raises(InputError, match="no checkpoint of MaxText that orbax"):
    from_maxtext(tmp_path / "absent", golden.config)


@pytest.mark.parametrize("name", ["qwen25_tied", "qwen3"])
def test_a_padded_vocabulary_is_cut(name):
  """That of the embedding, and of an output matrix of its own."""
  golden = load(GOLDEN / name, "float32")
  tree = maxtext_tree(name, golden.config, scanned=True)
  embedder, decoder = tree["token_embedder"], tree["decoder"]
  padding = ((0, 48), (0, 0))
  embedder["embedding"] = np.pad(embedder["embedding"], padding)
  if not golden.config.tie_embeddings:
    output = decoder["logits_dense"]
    output["kernel"] = np.pad(output["kernel"], padding[::-1])
  assert ("logits_dense" in decoder) == (name == "qwen3")
  assert_same(from_maxtext(tree, golden.config), golden)


def test_a_mesh_has_shares_of_the_parameters():
  golden = load(GOLDEN / "qwen3", "float32")
  tree = maxtext_tree("qwen3", golden.config, scanned=True)
  mesh = parse_mesh("model:4")
  lm = from_maxtext(tree, golden.config, mesh=mesh)
  up = lm.params["layers"][0]["mlp"]["up_proj"]["kernel"][...]
  assert up.addressable_shards[0].data.shape[-1] == up.shape[-1] // 4
  with jax.set_mesh(mesh):
    assert_same(lm, golden)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["llama31", "gemma3"])
def test_parameters_go_to_devices_once(monkeypatch, name, sharded):
  """From the host, whole, and to where they belong."""
  golden = load(GOLDEN / name, "float32")
  tree = maxtext_tree(name, golden.config, scanned=True)
  put_there, sent = jax.device_put, []

  def device_put(array, place):
    assert isinstance(array, np.ndarray)
    sent.append(array.size)
    return put_there(array, place)

  monkeypatch.setattr(jax, "device_put", device_put)
  # What else makes arrays of JAX of arrays of the host.
  for function in ("asarray", "array", "stack"):
    monkeypatch.delattr(jnp, function)
  mesh = parse_mesh("model:4") if sharded else None
  lm = from_maxtext(tree, golden.config, mesh=mesh)
  assert sorted(sent) == sorted(x.size for x in jax.tree.leaves(lm.params))


@pytest.mark.parametrize("name", ["llama31", "gemma3"])
def test_parameters_on_devices_stay_there(name):
  golden = load(GOLDEN / name, "float32")
  tree = maxtext_tree(name, golden.config, scanned=True)
  lm = from_maxtext(jax.tree.map(jnp.asarray, tree), golden.config)
  assert_same(lm, golden)


def test_what_maxtext_does_not_change_is_not_copied():
  config = load(GOLDEN / "gemma3", "float32").config
  kernel = np.ones((64, 1024), jnp.bfloat16)
  tracemalloc.start()
  converted = convert(config, "mlp.up_proj.kernel", kernel)
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert converted is kernel
  assert peak < kernel.nbytes
