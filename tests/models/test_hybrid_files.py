"""Files of models whose layers differ: MXFP4, vision towers, adapters."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.errors import InputError
from kvjax.models import lora
from kvjax.models.pretrained import load, load_decoder
from kvjax.models.saving import save

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
WHOLE = "model.safetensors"


def test_experts_in_four_bits_are_saved_as_they_are_computed(tmp_path):
  lm = load(GOLDEN / "gpt_oss_mxfp4", "float32")
  save(lm, tmp_path)
  again = load(tmp_path, "float32")
  assert again.model == lm.model
  jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
  # Every device reads and restores its own part.
  _, split = load_decoder(
    GOLDEN / "gpt_oss_mxfp4", "float32", parse_mesh("model:4")
  )
  jax.tree.map(np.testing.assert_array_equal, split, lm.params)


def damaged(folder, change):
  """The model in four bits with other tensors."""
  shutil.copytree(GOLDEN / "gpt_oss_mxfp4", folder / "model")
  path = folder / "model" / "model.safetensors"
  tensors = safetensors.numpy.load_file(path)
  change(tensors, "model.layers.1.mlp.experts.down_proj")
  safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
  return folder / "model"


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    (lambda t, n: t.pop(f"{n}_scales"), "lack the tensor .*down_proj_scales"),
    (
      lambda t, n: t.update({f"{n}_scales": t[f"{n}_scales"][:, 1:]}),
      r"must have a scale for each block, in the shape \(4, 32, 1\)",
    ),
    (
      lambda t, n: t.update({f"{n}_blocks": t[f"{n}_blocks"][..., :8]}),
      "is not in MXFP4, which has unsigned bytes",
    ),
    (
      lambda t, n: t.update({f"{n}_blocks": t[f"{n}_blocks"].astype("<u2")}),
      "is not in MXFP4, which has unsigned bytes",
    ),
  ],
  ids=["no scales", "few scales", "short blocks", "two bytes"],
)
def test_damaged_blocks_get_one_sentence(tmp_path, change, sentence):
  with pytest.raises(InputError, match=sentence) as caught:
    load_decoder(damaged(tmp_path, change), "float32")
  assert "\n" not in str(caught.value)


def test_a_vision_tower_is_skipped_and_said_so(tmp_path):
  """As the files of Gemma 3 from 4B on have it, and those of other models."""
  fields = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
  tensors = safetensors.numpy.load_file(GOLDEN / "gemma3" / WHOLE)
  _, expected = load_decoder(GOLDEN / "gemma3", "float32")
  picture = np.ones((2, 2), np.float32)
  for number, (text, tower) in enumerate(
    [
      ("language_model.model.", "vision_tower"),
      ("model.language_model.", "model.vision_tower"),
      ("model.language_model.", "model.visual"),
      ("model.", "visual"),
      ("model.", "vision_encoder"),
      # Of Idefics 3 and SmolVLM.
      ("model.text_model.", "model.vision_model"),
    ]
  ):
    folder = tmp_path / str(number)
    folder.mkdir()
    whole = {
      "model_type": "gemma3",
      "architectures": ["Gemma3ForConditionalGeneration"],
      "text_config": fields,
      "vision_config": {"model_type": "siglip_vision_model"},
      "mm_tokens_per_image": 256,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    renamed = {
      name.replace("model.", text, 1): value for name, value in tensors.items()
    }
    renamed[f"{tower}.encoder.weight"] = picture
    projector = "model." if tower.startswith("model.") else ""
    renamed[f"{projector}multi_modal_projector.weight"] = picture
    renamed[f"{projector}connector.weight"] = picture
    renamed[f"{projector}image_newline"] = picture
    safetensors.numpy.save_file(renamed, folder / WHOLE)
    with pytest.warns(kvjax.InputWarning, match="4 tensors of a vision tower"):
      _, params = load_decoder(folder, "float32")
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_adapters_of_experts_and_of_fused_projections(tmp_path):
  model, params = load_decoder(GOLDEN / "qwen3_moe", "float32")
  with pytest.raises(InputError, match="'up' of experts cannot be adapted"):
    lora.add_adapters(model, params, 2, ("q", "up"))
  _, adapted = lora.add_adapters(model, params, 2, ("q", "v"))
  lora.write_adapter(lora.split(adapted)[0], model.config, tmp_path, "base")
  file = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
  stem = "base_model.model.model.layers"
  layers = range(model.geometry.num_layers)
  assert file.keys() == {
    f"{stem}.{layer}.self_attn.{name}_proj.lora_{matrix}.weight"
    for layer in layers
    for name in "qv"
    for matrix in "AB"
  }
  model, params = load_decoder(GOLDEN / "phi3", "float32")
  _, adapted = lora.add_adapters(model, params, 2, ("q",))
  adapter = lora.split(adapted)[0]
  with pytest.raises(InputError, match="files store several projections"):
    lora.write_adapter(adapter, model.config, tmp_path, "base")
