"""Models that this decoder is no part of, and the text decoders in others."""

from collections.abc import Iterator, Mapping
from typing import Any

_MLA = "multi-head latent attention (MLA)"
# Fields that only models with a feature have, by the feature.
_FEATURES = {
  _MLA: ("kv_lora_rank", "q_lora_rank"),
  "linear attention": (
    "linear_attn_config",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "attn_type_list",
  ),
  "state-space layers (Mamba)": (
    "mamba_d_state",
    "mamba_d_conv",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
  ),
  "an audio tower": (
    "audio_config",
    "audio_tower",
    "audio_encoder_config",
    "audio_processor",
  ),
  "an encoder (cross-attention)": ("encoder_config", "encoder_layers"),
}
# In the metadata of GGUF files, how such fields start after the architecture.
_OF_GGUF = {
  _MLA: ("attention.kv_lora_rank", "attention.q_lora_rank"),
  "linear attention or state-space layers (Mamba)": ("ssm.", "wkv."),
}
_IMAGES = "vision_config"
_LINEAR = "linear_attention"
_OF_ALL = ("tie_word_embeddings", "quantization_config")
# How deep configurations are searched, as thinker_config.text_config is.
_DEPTH = 3


def find_features(fields: Mapping[str, Any]) -> tuple[list[str], set[str]]:
  """Finds features that are not supported, wherever they are nested.

  The configuration of images is not searched, as it is not read.

  Returns:
    The errors, see `kvjax.models.fields.ConfigError`, and the names of the
    fields behind them, without those that they are nested in.
  """
  faults: list[str] = []
  names: set[str] = set()
  paths = list(_paths(fields))
  for feature, of_feature in _FEATURES.items():
    found = [
      path
      for name in of_feature
      for path in paths
      if path.rpartition(".")[2] == name
    ]
    if found:
      faults.append(
        f"asks for {feature}, as {found[0]!r} says, which is not supported"
      )
      names.update(path.rpartition(".")[2] for path in found)
  kinds = text_fields(fields).get("layer_types")
  if isinstance(kinds, list) and _LINEAR in kinds and not faults:
    faults.append(
      f"asks for linear attention, as {_LINEAR!r} in 'layer_types' says, which "
      "is not supported"
    )
    names.add("layer_types")
  return faults, names


def _paths(fields: Mapping[str, Any], depth: int = _DEPTH) -> Iterator[str]:
  """The fields that are set, and those of configurations within after a dot."""
  for name, value in fields.items():
    if value:
      yield name
    if isinstance(value, dict) and name != _IMAGES and depth:
      yield from (f"{name}.{inner}" for inner in _paths(value, depth - 1))


def find_gguf_feature(
  fields: Mapping[str, Any], architecture: str
) -> tuple[str, str] | None:
  """Finds a feature that is not supported in the metadata of a GGUF file.

  Args:
    fields: the metadata.
    architecture: the name that its fields start with.

  Returns:
    The feature and the name of the field behind it, or None.
  """
  for feature, starts in _OF_GGUF.items():
    of_feature = tuple(f"{architecture}.{start}" for start in starts)
    for name in fields:
      if name.startswith(of_feature):
        return feature, name
  return None


def text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the fields of the text decoder of a model that has images, too.

  Other models are returned as they are.
  """
  text = fields.get("text_config")
  if not isinstance(text, dict) or fields.get(_IMAGES) is None:
    return fields
  # In these files, the whole model may say that embeddings are tied, and how
  # weights are quantized.
  shared = {k: fields[k] for k in _OF_ALL if k in fields}
  return shared | text
