"""What MaxText's own conversion makes of a model is read back."""

import json
import types

import numpy as np
import pytest
import safetensors.numpy
from adapted import GOLDEN, assert_same, put
from maxtext_trees import MAXTEXT

from kvjax.models.adapters import from_maxtext
from kvjax.models.pretrained import load

MAXTEXT_NAMES = {
  "llama31": "llama3.1-8b",
  "qwen25": "qwen2.5-7b",
  "qwen3": "qwen3-8b",
  "gemma3": "gemma3-4b",
  "gpt_oss": "gpt-oss-20b",
  "olmo3": "olmo3-7b",
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MAXTEXT_NAMES)
def test_what_maxtext_converts_is_read_back(name):
  """By the package's own names and functions of its conversion."""
  mapping = pytest.importorskip(
    "maxtext.checkpoint_conversion.utils.param_mapping"
  )
  golden = load(GOLDEN / name, "float32")
  config = golden.config
  fields = json.loads((GOLDEN / name / "config.json").read_text())
  fields["head_dim"] = config.head_dim
  files = {
    tensor: x
    for path in (GOLDEN / name).glob("*.safetensors")
    for tensor, x in safetensors.numpy.load_file(path).items()
  }
  if name == "gemma3":
    fields = {"text_config": fields, "vision_config": {"num_hidden_layers": 0}}
    files = {
      tensor.replace("model.", "model.language_model.", 1): x
      for tensor, x in files.items()
    }
  own = types.SimpleNamespace(inhomogeneous_layer_cycle_interval=MAXTEXT[name])
  model = MAXTEXT_NAMES[name]
  hooks = mapping.HOOK_FNS[model](fields, own, True, saving_to_hf=False)
  heads = {"query": config.num_heads}
  heads |= dict.fromkeys(("key", "value"), config.num_kv_heads)

  def shape(path, x):
    """The shape in MaxText of a tensor that is stored."""
    *_, module, kind = path.split("-")
    if module in heads:
      split = (heads[module], config.head_dim)
      return split if kind == "bias" else (config.hidden_size, *split)
    if (module, kind) == ("out", "kernel"):
      return config.num_heads, config.head_dim, config.hidden_size
    return x.shape[::-1] if kind == "kernel" else x.shape

  def converted(key, tensor):
    x, functions = files[tensor], hooks.get(key, [])
    path = key if isinstance(key, str) else key[0]
    target = shape(path, x)
    for change in functions if isinstance(functions, list) else [functions]:
      x = np.asarray(change(x, target))
    return x

  tree = {}
  for key, tensors in mapping.PARAM_MAPPING[model](fields, own, True).items():
    stacked = isinstance(tensors, list)
    tensors = tensors if stacked else [tensors]
    if tensors[0] not in files:
      continue
    found = [converted(key, tensor) for tensor in tensors]
    whole = np.stack(found, axis=1) if stacked else found[0]
    if isinstance(key, str):
      put(tree, key.replace("-", "/"), whole)
      continue
    # One tensor that MaxText has as two: along the last axis.
    for number, path in enumerate(key):
      put(tree, path.replace("-", "/"), whole[..., number])
  assert_same(from_maxtext(tree, config), golden)
