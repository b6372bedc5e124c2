"""Golden models as MaxText stores them."""

import jax.numpy as jnp
import numpy as np
from adapted import GOLDEN, put, tensors_of

# The layout of MaxText, by golden model: the period of its blocks of layers.
MAXTEXT = {
  "llama3": 0,
  "llama31": 0,
  "mistral": 0,
  "qwen25": 0,
  "qwen25_tied": 0,
  "qwen3": 0,
  "gpt_oss": 2,
  "gemma3": 6,
  "olmo3": 4,
}


# Names in a layer of MaxText and at Hugging Face.
MAXTEXT_LAYER = {
  "pre_self_attention_layer_norm/scale": "input_layernorm.weight",
  "post_self_attention_layer_norm/scale": "post_attention_layernorm.weight",
  "post_mlp_layer_norm/scale": "post_feedforward_layernorm.weight",
  "{attention}/query/kernel": "self_attn.q_proj.weight",
  "{attention}/key/kernel": "self_attn.k_proj.weight",
  "{attention}/value/kernel": "self_attn.v_proj.weight",
  "{attention}/out/kernel": "self_attn.o_proj.weight",
  "{attention}/query/bias": "self_attn.q_proj.bias",
  "{attention}/key/bias": "self_attn.k_proj.bias",
  "{attention}/value/bias": "self_attn.v_proj.bias",
  "{attention}/out/bias": "self_attn.o_proj.bias",
  "{attention}/query_norm/scale": "self_attn.q_norm.weight",
  "{attention}/key_norm/scale": "self_attn.k_norm.weight",
  "{attention}/sinks": "self_attn.sinks",
  "mlp/wi_0/kernel": "mlp.gate_proj.weight",
  "mlp/wi_1/kernel": "mlp.up_proj.weight",
  "mlp/wo/kernel": "mlp.down_proj.weight",
  "GptOssMlp/gate/kernel": "mlp.router.weight",
  "GptOssMlp/gate/bias": "mlp.router.bias",
  "GptOssMlp/wo": "mlp.experts.down_proj",
  "GptOssMlp/wo_bias": "mlp.experts.down_proj_bias",
}


GEMMA_NORMS = {
  "pre_self_attention_norm/scale": "input_layernorm.weight",
  "post_self_attention_norm/scale": "post_attention_layernorm.weight",
  "pre_ffw_norm/scale": "pre_feedforward_layernorm.weight",
  "post_ffw_norm/scale": "post_feedforward_layernorm.weight",
}


ATTENTION = {"gpt_oss": "GptOssAttention", "olmo3": "attention"}


def maxtext_layer(config, tensors, layer):
  """A layer in MaxText's layout, by path."""
  kind = config.model_type
  names = MAXTEXT_LAYER
  if kind == "gemma3_text":
    names = {k: v for k, v in names.items() if "layer_norm" not in k}
    names |= GEMMA_NORMS
  found = {}
  for path, name in names.items():
    value = tensors.get(f"model.layers.{layer}.{name}")
    if value is None:
      continue
    path = path.format(attention=ATTENTION.get(kind, "self_attention"))
    if "/out/kernel" in path:
      value = value.reshape(-1, config.head_dim, config.hidden_size)
    elif any(f"/{one}/" in path for one in ("query", "key", "value")):
      value = value.reshape(*value.shape[:-1], -1, config.head_dim)
    if kind == "llama" and "/query/kernel" in path:
      value = value / np.sqrt(config.head_dim)
    if config.rope.kind == "llama3" and ("/query/" in path or "/key/" in path):
      halves = np.split(value, 2, axis=-1)
      value = np.stack(halves, axis=-1).reshape(value.shape)
    if kind == "gemma3_text" and path.endswith("scale"):
      value = value + 1
    if kind == "mistral" and "/query/kernel" in path:
      value = value / np.sqrt(config.head_dim)
    found[path] = value.astype(np.float32)
  both = tensors.get(f"model.layers.{layer}.mlp.experts.gate_up_proj")
  if both is not None:
    bias = tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj_bias"]
    for number in range(2):
      found[f"GptOssMlp/wi_{number}"] = both[..., number::2]
      # `tensors_of` has transposed it: it is a matrix.
      found[f"GptOssMlp/wi_{number}_bias"] = bias.T[..., number::2]
    found["GptOssMlp/wo_bias"] = found["GptOssMlp/wo_bias"].T
  return found


def maxtext_tree(name, config, scanned):
  """A golden model as MaxText stores it."""
  tensors, tree = tensors_of(GOLDEN / name), {}
  embedding = tensors["model.embed_tokens.weight"]
  scale = np.float32(1)
  if config.model_type == "gemma3_text":
    scale = np.float32(jnp.bfloat16(np.sqrt(config.hidden_size)))
  put(tree, "token_embedder/embedding", embedding * scale)
  offset = config.model_type == "gemma3_text"
  put(tree, "decoder/decoder_norm/scale", tensors["model.norm.weight"] + offset)
  if "lm_head.weight" in tensors:
    put(tree, "decoder/logits_dense/kernel", tensors["lm_head.weight"])
  layers = [maxtext_layer(config, tensors, n) for n in range(config.num_layers)]
  period = MAXTEXT[name] or 1
  whole = config.num_layers - config.num_layers % period
  for number, layer in enumerate(layers):
    for path, value in layer.items():
      if not scanned:
        put(tree, f"decoder/layers_{number}/{path}", value)
      elif number >= whole:
        rest = f"decoder/layers_remainder/layers_{number - whole}/{path}"
        put(tree, rest, value)
      elif number < period:
        block = f"layers_{number}/" if MAXTEXT[name] else ""
        stack = [own[path] for own in layers[number:whole:period]]
        put(tree, f"decoder/layers/{block}{path}", np.stack(stack, axis=1))
  return tree
