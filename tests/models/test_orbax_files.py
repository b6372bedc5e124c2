"""Weights as a checkpoint of orbax: under another mesh, damaged, replaced."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import kvjax
from kvjax import files
from kvjax.cache.sharding import parse_mesh
from kvjax.errors import InputError
from kvjax.models.pretrained import load
from kvjax.models.saving import save

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
REFERENCE = pathlib.Path(__file__).parents[2] / "models" / "reference"
CHECKPOINT = "model.orbax"
# With another output matrix, biases, windows in some layers, and experts.
FAMILIES = ("llama31", "qwen25", "gemma3", "gpt_oss")


def assert_same_weights(one, other):
  assert jax.tree.structure(one.params) == jax.tree.structure(other.params)
  for x, y in zip(
    *map(jax.tree.leaves, (one.params, other.params)), strict=True
  ):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


def restore(checkpoint):
  """Reads all that is there, by orbax alone."""
  found = ocp.metadata(checkpoint).metadata
  return ocp.load(
    checkpoint, jax.tree.map(lambda x: np.empty(x.shape, x.dtype), found)
  )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """The reference model, saved on a mesh."""
  folder = tmp_path_factory.mktemp("saved") / "model"
  mesh = parse_mesh("data:2,model:2")
  save(load(REFERENCE, "float32", mesh), folder, format="orbax")
  return folder


@pytest.fixture
def directory(saved, tmp_path):
  """A copy to be damaged."""
  return shutil.copytree(saved, tmp_path / "model")


def test_tokenizer_and_config_are_beside_the_checkpoint(saved):
  before, after = load(REFERENCE, "float32"), load(saved, "float32")
  assert_same_weights(before, after)
  assert after.model == before.model
  assert after.config == before.config
  assert after.generation == before.generation
  text = "The number of Oslo is 7."
  assert after.text.encode(text) == before.text.encode(text)
  assert sorted(path.name for path in saved.iterdir()) == [
    "config.json",
    "generation_config.json",
    CHECKPOINT,
    "tokenizer.json",
    "tokenizer_config.json",
  ]
  assert not list(saved.parent.glob("model.*"))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_kind_of_stack_comes_back_as_it_was(family, tmp_path):
  before = load(GOLDEN / family, "bfloat16")
  save(before, tmp_path, format="orbax")
  after = load(tmp_path)
  assert after.model == before.model
  assert_same_weights(before, after)
  # As from other files, JAX may move them to where it computes.
  assert not any(x.committed for x in jax.tree.leaves(after.params))


def test_each_device_gets_its_part(saved):
  mesh = parse_mesh("model:4")
  other = load(REFERENCE, "float32", mesh)
  lm = load(saved, "float32", mesh)
  assert_same_weights(lm, other)
  for x, y in zip(
    *map(jax.tree.leaves, (lm.params, other.params)), strict=True
  ):
    assert x.sharding == y.sharding
  up = lm.params["layers"][0]["mlp"]["up_proj"]["kernel"][...]
  assert up.addressable_shards[0].data.shape[2] == up.shape[2] // 4


def test_weights_are_converted_while_they_are_read(saved):
  lm, other = load(saved, "bfloat16"), load(REFERENCE, "bfloat16")
  assert_same_weights(lm, other)


def test_orbax_alone_restores_the_tree(saved):
  lm = load(saved, "float32")
  tree = restore(saved / CHECKPOINT)
  np.testing.assert_array_equal(
    tree["layers"]["0"]["mlp"]["up_proj"]["kernel"],
    lm.params["layers"][0]["mlp"]["up_proj"]["kernel"][...],
  )


SCRIPT = """
import json, sys
import jax
from test_orbax_files import GOLDEN, first_logits
from kvjax.cache.sharding import parse_mesh
from kvjax.models.pretrained import load
from kvjax.models.saving import save

assert len(jax.devices()) == 8
mesh = parse_mesh("model:2,data:4")
save(load(GOLDEN / "qwen25", "float32", mesh), sys.argv[1], format="orbax")
found = {}
for name in (None, "model:4"):
  mesh = None if name is None else parse_mesh(name)
  for folder in (GOLDEN / "qwen25", sys.argv[1]):
    found.setdefault(str(name), []).append(first_logits(folder, mesh))
print(json.dumps(found))
"""


def first_logits(folder, mesh):
  lm = load(folder, "float32", mesh)
  rows = [list(range(1, n)) for n in range(20, 28)]
  plan = kvjax.get_plan("keydiff", kvjax.Retention(0.5))

  def prefill():
    prompts = kvjax.Prompts.of(rows)
    return kvjax.prefill(lm.model, lm.params, prompts, plan)[1].tolist()

  if mesh is None:
    return prefill()
  with jax.set_mesh(mesh):
    return prefill()


def test_what_eight_devices_save_other_meshes_load(tmp_path):
  flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=8")
  run = subprocess.run(
    [sys.executable, "-c", SCRIPT, str(tmp_path / "saved")],
    env={**os.environ, "XLA_FLAGS": flags},
    cwd=pathlib.Path(__file__).parent,
    capture_output=True,
    text=True,
    check=False,
  )
  assert run.returncode == 0, run.stderr
  found = json.loads(run.stdout.splitlines()[-1])
  assert len(found) == 2
  (alone, _) = found["None"]
  for original, restored in found.values():
    assert restored == original
    np.testing.assert_allclose(restored, alone, rtol=0, atol=1e-4)


def test_a_later_save_replaces_weights_of_either_format(tmp_path):
  one, other = load(GOLDEN / "llama31"), load(GOLDEN / "llama3")
  for first, second in ((one, other), (other, one)):
    for formats in (("safetensors", "orbax"), ("orbax", "orbax")):
      save(first, tmp_path, format=formats[0])
      save(second, tmp_path, format=formats[1])
      assert not list(tmp_path.glob("*.safetensors*"))
      assert_same_weights(load(tmp_path), second)
    save(first, tmp_path, max_shard_bytes=30_000)
    assert not (tmp_path / CHECKPOINT).exists()
    assert_same_weights(load(tmp_path), first)


def _no_checkpoint(directory):
  shutil.rmtree(directory / CHECKPOINT)


def _a_file(directory):
  shutil.rmtree(directory / CHECKPOINT)
  (directory / CHECKPOINT).write_text("")


def _empty(directory):
  shutil.rmtree(directory / CHECKPOINT)
  (directory / CHECKPOINT).mkdir()


def _no_tree(directory):
  (directory / CHECKPOINT / "state" / "_METADATA").unlink()


def _broken_tree(directory):
  path = directory / CHECKPOINT / "state" / "_METADATA"
  path.write_bytes(path.read_bytes()[:100])


def _largest(directory):
  files = [p for p in (directory / CHECKPOINT).rglob("*") if p.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def _cut(directory):
  path = _largest(directory)
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _no_data(directory):
  _largest(directory).unlink()


def _edit_config(directory, **fields):
  path = directory / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _other_width(directory):
  _edit_config(directory, intermediate_size=40)


def _other_layers(directory):
  _edit_config(directory, num_hidden_layers=5)


def _replace(directory, change):
  tree = restore(directory / CHECKPOINT)
  change(tree)
  shutil.rmtree(directory / CHECKPOINT)
  ocp.save(directory / CHECKPOINT, tree)


def _lacking(directory):
  _replace(directory, lambda tree: tree.pop("norm"))


def _more(directory):
  _replace(directory, lambda tree: tree.update(extra=np.ones(3)))


def _integers(directory):
  def change(tree):
    tree["norm"]["scale"] = np.ones(tree["norm"]["scale"].shape, np.int8)

  _replace(directory, change)


def _a_number(directory):
  _replace(directory, lambda tree: tree["norm"].update(scale=3))


def _nan(directory):
  def change(tree):
    tree["norm"]["scale"] = np.full(
      tree["norm"]["scale"].shape, np.inf, np.float32
    )

  _replace(directory, change)


@pytest.mark.parametrize(
  ("damage", "sentence"),
  [
    (_no_checkpoint, r"no weights; it should hold .*, or model\.orbax"),
    (_a_file, r"no weights; it should hold .*, or model\.orbax"),
    (_empty, r"model\.orbax is no complete checkpoint of orbax; save the"),
    (_no_tree, r"model\.orbax is no complete checkpoint of orbax; save the"),
    (_broken_tree, r"model\.orbax is no complete checkpoint of orbax; save"),
    (_cut, r"parameter [\w.]+ in .*model\.orbax is damaged or incomplete; sa"),
    (_no_data, r"parameter [\w.]+ in .* is damaged or incomplete; save the"),
    (_other_width, r"mlp\.[\w.]+ in .* has shape .*; config\.json asks for \("),
    (_other_layers, r"in .* has shape \(6, .*config\.json asks for \(5, "),
    (_lacking, r"model\.orbax lack the parameter norm\.scale"),
    (_more, r"hold the parameter extra, which the model of config\.json does"),
    (_integers, r"norm\.scale in .* is stored as int8; only float32, float16"),
    (_a_number, r"norm\.scale in .* has shape"),
    (_nan, r"norm\.scale in .* holds NaN or infinite values"),
  ],
)
def test_a_damaged_checkpoint_gets_one_sentence(directory, damage, sentence):
  damage(directory)
  with pytest.raises(InputError, match=sentence) as caught:
    load(directory, "float32")
  assert "\n" not in str(caught.value)
  assert str(caught.value).endswith(".")


def test_an_unknown_format_is_refused_before_anything_is_removed(directory):
  lm = load(directory)
  with pytest.raises(InputError) as caught:
    save(lm, directory, format="torch")
  assert str(caught.value) == (
    "There is no format 'torch' of weights; formats are safetensors, orbax."
  )
  assert_same_weights(load(directory), lm)


@pytest.mark.parametrize(
  "error",
  [
    OSError(28, "No space left on device"),
    ValueError("Failed to write 95 bytes to file 19: No space left on device"),
  ],
  ids=["OSError", "ValueError"],
)
def test_a_full_disk_leaves_the_model_as_it_was(directory, monkeypatch, error):
  lm = load(directory)

  def fail(*_):
    raise error

  with monkeypatch.context() as patched:
    patched.setattr(files.orbax(), "save", fail)
    with pytest.raises(InputError) as caught:
      save(lm, directory, format="orbax")
  assert str(caught.value) == (
    f"The model cannot be written to {directory}: No space left on device."
  )
  assert_same_weights(load(directory), lm)
