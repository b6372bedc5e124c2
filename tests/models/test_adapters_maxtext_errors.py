"""Checkpoints of MaxText that are not of the model are refused."""

import dataclasses

import numpy as np
import pytest
from adapted import GOLDEN, put
from maxtext_trees import maxtext_tree

from kvjax.errors import InputError
from kvjax.models.adapters import from_maxtext
from kvjax.models.pretrained import load


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    (
      lambda tree: tree["decoder"]["layers"]["mlp"].pop("wo"),
      "lack decoder/layers/mlp/wo/kernel; give those of a whole model",
    ),
    (
      lambda tree: put(tree, "decoder/layers/mlp/lora_a", np.ones(3)),
      "hold decoder/layers/mlp/lora_a, which a model of this family does not",
    ),
    (
      lambda tree: put(tree, "decoder/decoder_norm/scale", np.ones(3)),
      r"norm.scale has the shape \(3,\), where the config asks for \(32,\)",
    ),
    (
      lambda tree: transpose(tree["decoder"]["layers"]["mlp"]["wi_0"]),
      r"gate_proj.kernel has the shape \(\d, 48, 32\), where the config asks",
    ),
    (
      lambda tree: transpose(
        tree["decoder"]["layers"]["self_attention"]["out"]
      ),
      r"o_proj.kernel has the shape \(\d, 32, 16, 4\), where the config asks",
    ),
  ],
  ids=["missing", "unknown", "size", "matrix", "heads"],
)
def test_parameters_that_do_not_fit_are_named(change, sentence):
  golden = load(GOLDEN / "qwen3", "float32")
  tree = maxtext_tree("qwen3", golden.config, scanned=True)
  change(tree)
  with pytest.raises(InputError, match=sentence):
    from_maxtext(tree, golden.config)


def transpose(parameter):
  """Of scanned layers: all axes but theirs, the second."""
  x = np.moveaxis(parameter["kernel"], 1, 0)
  reverse = np.transpose(x, (0, *range(x.ndim - 1, 0, -1)))
  parameter["kernel"] = np.moveaxis(reverse, 0, 1)


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo3"])
def test_another_number_of_layers_is_refused(name, scanned):
  """More or fewer than the config says, in blocks or not."""
  config = load(GOLDEN / name, "float32").config
  tree = maxtext_tree(name, config, scanned)
  for layers in (config.num_layers - 1, config.num_layers + 1):
    pattern = (config.layer_kinds * 2)[:layers]
    other = dataclasses.replace(
      config,
      num_layers=layers,
      pattern=pattern,
      kinds=config.kinds[: max(pattern) + 1],
    )
    sentence = "has the shape.*layers along axis 1"
    if not scanned:
      sentence = rf"decoder/layers_{min(layers, config.num_layers)}/"
    with pytest.raises(InputError, match=sentence):
      from_maxtext(tree, other)


@pytest.mark.parametrize("axis", [0, 2, -1])
def test_another_axis_of_scanned_layers_is_refused(axis):
  golden = load(GOLDEN / "qwen3", "float32")
  tree = maxtext_tree("qwen3", golden.config, scanned=True)
  with pytest.raises(InputError, match=r"layers along axis|must be 0 or more"):
    from_maxtext(tree, golden.config, scan_axis=axis)


def test_families_that_maxtext_lacks_are_refused():
  golden = load(GOLDEN / "granite", "float32")
  with pytest.raises(InputError, match="the config is of granite"):
    from_maxtext({}, golden.config)
