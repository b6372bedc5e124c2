"""Models that this decoder is no part of, and the text decoders in others."""

from collections.abc import Mapping
from typing import Any

# Fields that only models with a feature have, by the feature.
_FEATURES = {
  "multi-head latent attention (MLA)": ("kv_lora_rank", "q_lora_rank"),
  "linear attention": (
    "linear_attn_config",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
  ),
  "state-space layers (Mamba)": (
    "mamba_d_state",
    "mamba_d_conv",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
  ),
  "an audio tower": ("audio_config", "audio_tower", "audio_encoder_config"),
  "an encoder (cross-attention)": ("encoder_config", "encoder_layers"),
}


def find_features(fields: Mapping[str, Any]) -> tuple[list[str], set[str]]:
  """Finds features that are not supported.

  Returns:
    The errors, see `kvjax.models.fields.ConfigError`, and the names of the
    fields behind them.
  """
  faults: list[str] = []
  names: set[str] = set()
  for feature, of_feature in _FEATURES.items():
    found = [name for name in of_feature if fields.get(name)]
    if found:
      faults.append(
        f"asks for {feature}, as {found[0]!r} says, which is not supported"
      )
      names.update(found)
  return faults, names


def text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the fields of the text decoder of a model that has images, too.

  Other models are returned as they are.
  """
  text = fields.get("text_config")
  if not isinstance(text, dict) or fields.get("vision_config") is None:
    return fields
  # In these files, the whole model may say that embeddings are tied.
  shared = {k: fields[k] for k in ("tie_word_embeddings",) if k in fields}
  return shared | text
