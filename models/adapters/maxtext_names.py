"""Names and layouts of the parameters of MaxText."""

import jax.numpy as jnp
import numpy as np

from kvjax.models.adapters.parameters import Stored
from kvjax.models.config import DecoderConfig

# Parameters outside of the layers, by their names in `kvjax.models.decoder`.
TOP = {
  "embed_tokens.embedding": "token_embedder/embedding",
  "norm.scale": "decoder/decoder_norm/scale",
  "lm_head.kernel": "decoder/logits_dense/kernel",
}
# Parts of names in a layer, one after the other.
_ATTENTION = {
  "q_proj": "query",
  "k_proj": "key",
  "v_proj": "value",
  "o_proj": "out",
  "q_norm": "query_norm",
  "k_norm": "key_norm",
}
_MLP = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}
_NORMS = {
  "input_layernorm": "pre_self_attention_layer_norm",
  "post_attention_layernorm": "post_self_attention_layer_norm",
  "post_feedforward_layernorm": "post_mlp_layer_norm",
}
_GEMMA_NORMS = {
  "input_layernorm": "pre_self_attention_norm",
  "post_attention_layernorm": "post_self_attention_norm",
  "pre_feedforward_layernorm": "pre_ffw_norm",
  "post_feedforward_layernorm": "post_ffw_norm",
}
# What a layer calls its attention and its MLP, by the model type.
MODULES = {
  "llama": ("self_attention", "mlp"),
  "mistral": ("self_attention", "mlp"),
  "qwen2": ("self_attention", "mlp"),
  "qwen3": ("self_attention", "mlp"),
  "qwen3_moe": ("self_attention", "moe_block"),
  "gemma3_text": ("self_attention", "mlp"),
  "gpt_oss": ("GptOssAttention", "GptOssMlp"),
  "olmo3": ("attention", "mlp"),
}


def find_path(config: DecoderConfig, name: str) -> str:
  """Path in a layer of a parameter by its name in the decoder."""
  attention, mlp = MODULES[config.model_type]
  module, *rest, kind = name.split(".")
  if module == "self_attn":
    if not rest:
      return f"{attention}/{kind}"
    return f"{attention}/{_ATTENTION[rest[0]]}/{kind}"
  if module != "mlp":
    norms = _GEMMA_NORMS if config.model_type == "gemma3_text" else _NORMS
    return f"{norms[module]}/{kind}"
  if rest[0] == "router":
    return f"{mlp}/gate/{kind}"
  if rest[0] == "experts":
    return f"{mlp}/{_MLP[rest[1]]}{'_bias' if kind == 'bias' else ''}"
  return f"{mlp}/{_MLP[rest[0]]}/{kind}"


def convert(config: DecoderConfig, name: str, found: Stored) -> Stored:
  """Undoes what MaxText changes in parameters."""
  dtype = found.dtype
  if config.model_type == "gemma3_text":
    if name.endswith(".scale"):
      return (found.astype(np.float32) - 1.0).astype(dtype)
    if name == "embed_tokens.embedding":
      factor = float(np.asarray(config.hidden_size**0.5, jnp.bfloat16))
      return (found.astype(np.float32) / factor).astype(dtype)
  if config.model_type in ("llama", "mistral"):
    is_query = name == "self_attn.q_proj.kernel"
    if is_query:
      wide = found.astype(np.float32)
      found = (wide * config.head_dim**0.5).astype(dtype)
    if config.rope.kind == "llama3" and (is_query or ".k_proj." in name):
      # With this scaling, MaxText rotates neighboring channels.
      channels = (*range(0, config.head_dim, 2), *range(1, config.head_dim, 2))
      return found[..., np.array(channels)]
  return found
