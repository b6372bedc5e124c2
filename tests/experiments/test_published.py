"""Sizes of published models, by name or from a config.json."""

import json
import math

import jax
import pytest
from tiny_published import TINY

from kvjax.cache.sharding import parse_mesh
from kvjax.errors import InputError
from kvjax.experiments.compilation.published import LLAMA, SHIPPED, Published

# Parameters as their pages at huggingface.co count them.
PARAMETERS = {
  "llama-3.1-8b": 8_030_261_248,
  "llama-3.1-70b": 70_553_706_496,
  "qwen2.5-7b": 7_615_616_512,
  "qwen2.5-14b": 14_770_033_664,
  "qwen2.5-32b": 32_763_876_352,
  "qwen3-8b": 8_190_735_360,
  "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_models_that_ship_have_their_published_sizes(name):
  published = Published.shipped(name)
  mesh = parse_mesh("model:1")
  _, params = published.shapes(mesh, published.layers)
  counted = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  assert counted == PARAMETERS[name]
  assert {*PARAMETERS} < {*SHIPPED}


def test_a_model_is_found_by_name_or_by_its_file(tmp_path):
  assert Published.find("Llama-3.1-8B").fields == LLAMA.fields
  folder = tmp_path / "mine"
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(dict(TINY.fields)))
  for path in (folder, folder / "config.json"):
    found = Published.find(str(path))
    assert (found.name, found.layers, found.kv_heads) == ("mine", 6, 2)
  with pytest.raises(InputError, match="did you mean qwen3-8b"):
    Published.find("qwen3-8")
  (folder / "config.json").write_text('{"model_type": "llama"}')
  with pytest.raises(InputError, match="lacks the field"):
    Published.find(str(folder))


def test_fields_of_layers_are_those_of_the_first_ones():
  names = ["full_attention", "sliding_attention"] * 3
  fields = {
    **TINY.fields,
    "model_type": "qwen3",
    "head_dim": 8,
    "layer_types": names,
    "use_sliding_window": True,
    "sliding_window": 16,
  }
  config = Published("mixed", fields).config(4)
  assert [layer.window for layer in config.geometry.layers] == [
    None,
    16,
    None,
    16,
  ]
