"""Small GGUF files, made of the golden models as llama.cpp makes them."""

import json
import math
import pathlib
import shutil

import gguf
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
CONTROL = gguf.TokenType.CONTROL

_NAMES = {
  "model.embed_tokens": "token_embd",
  "model.norm": "output_norm",
  "lm_head": "output",
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "self_attn.q_norm": "attn_q_norm",
  "self_attn.k_norm": "attn_k_norm",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


_KNOWN = ("model.", "lm_head.")


def _own_name(name):
  module, _, kind = name.rpartition(".")
  start = ""
  if module.startswith("model.layers."):
    _, _, layer, module = module.split(".", 3)
    start = f"blk.{layer}."
  return f"{start}{_NAMES[module]}.{kind}"


def _neighbors(x, heads):
  """The order of rows in which llama.cpp's rotation pairs neighbors."""
  halves = x.reshape(heads, 2, -1, *x.shape[1:])
  return halves.swapaxes(1, 2).reshape(x.shape)


def _tokens(count):
  """A byte-level vocabulary of few letters, its kinds and its merges."""
  letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  merges = ["a b", "ab c"]
  special = ["<s>", "</s>", "<|turn|>", "<tool>"]
  tokens = letters[: count - 2 - len(special) - 1]
  kinds = [gguf.TokenType.NORMAL] * (len(tokens) + 2)
  kinds += [CONTROL, CONTROL, CONTROL, gguf.TokenType.USER_DEFINED]
  tokens += ["ab", "abc", *special, "[PAD]"]
  return tokens, [*kinds, gguf.TokenType.UNUSED], merges


def _rope_factors(rope, head_dim):
  """What Llama 3's scaling divides each frequency by."""
  low, high = rope["low_freq_factor"], rope["high_freq_factor"]
  context, factor = rope["original_max_position_embeddings"], rope["factor"]
  factors = []
  for power in range(0, head_dim, 2):
    wavelength = 2 * math.pi * rope["rope_theta"] ** (power / head_dim)
    if wavelength < context / high:
      factors.append(1.0)
    elif wavelength > context / low:
      factors.append(factor)
    else:
      smooth = (context / wavelength - low) / (high - low)
      factors.append(1 / ((1 - smooth) / factor + smooth))
  return np.asarray(factors, np.float32)


class Maker:
  """Writes a golden model's directory and the GGUF file of the same weights.

  Vectors stay in 32 bits, and so do matrices whose rows no blocks fill.

  Attributes:
    directory: a Hugging Face directory without a tokenizer.
    path: of the GGUF file.
    config: fields of config.json.
    fields: the metadata that are to be written; None leaves one out.
    tensors: by Hugging Face's names, or by GGUF's where that knows others.
  """

  def __init__(self, folder, family="llama3", kind="F32", **config):
    self.directory = folder / "directory"
    self.path = folder / "model.gguf"
    shutil.copytree(GOLDEN / family, self.directory)
    path = self.directory / "config.json"
    self.config = json.loads(path.read_text()) | config
    path.write_text(json.dumps(self.config))
    self.kind = gguf.GGMLQuantizationType[kind]
    self.tensors = {}
    for file in self.directory.glob("*.safetensors"):
      self.tensors |= safetensors.numpy.load_file(file)
    self.fields = self._fields()

  def _fields(self):
    config, kind = self.config, self.config["model_type"]
    tokens, kinds, merges = _tokens(config["vocab_size"])
    ids = {token: number for number, token in enumerate(tokens)}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
      self.tensors["rope_freqs.weight"] = _rope_factors(rope, head_dim)
    fields = {
      "general.architecture": kind,
      f"{kind}.block_count": config["num_hidden_layers"],
      f"{kind}.context_length": config["max_position_embeddings"],
      f"{kind}.embedding_length": config["hidden_size"],
      f"{kind}.feed_forward_length": config["intermediate_size"],
      f"{kind}.attention.head_count": heads,
      f"{kind}.attention.head_count_kv": config["num_key_value_heads"],
      f"{kind}.attention.key_length": head_dim,
      f"{kind}.attention.value_length": head_dim,
      f"{kind}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
      f"{kind}.rope.dimension_count": head_dim,
      f"{kind}.rope.freq_base": float(rope["rope_theta"]),
      f"{kind}.vocab_size": config["vocab_size"],
      "tokenizer.ggml.model": "gpt2",
      "tokenizer.ggml.pre": "llama-bpe" if kind == "llama" else "qwen2",
      "tokenizer.ggml.tokens": tokens,
      "tokenizer.ggml.token_type": [int(k) for k in kinds],
      "tokenizer.ggml.merges": merges,
      "tokenizer.ggml.bos_token_id": ids["<s>"],
      "tokenizer.ggml.eos_token_id": ids["</s>"],
      "tokenizer.ggml.eot_token_id": ids["<|turn|>"],
    }
    scaling = f"{kind}.rope.scaling"
    if rope["rope_type"] in ("linear", "yarn"):
      fields[f"{scaling}.type"] = rope["rope_type"]
      fields[f"{scaling}.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
      original = rope["original_max_position_embeddings"]
      fields[f"{scaling}.original_context_length"] = original
    return fields

  def write(self):
    """The file, as it and the directory beside it now are."""
    writer = gguf.GGUFWriter(self.path, self.fields["general.architecture"])
    for key, value in self.fields.items():
      if key == "general.architecture" or value is None:
        continue
      types = gguf.GGUFValueType
      kind = types.UINT32 if type(value) is int else types.get_type(value)
      writer.add_key_value(key, value, kind)
    stored = {}
    for name, value in self.tensors.items():
      own = _own_name(name) if name.startswith(_KNOWN) else name
      kind = self.kind
      fits = value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
      if value.ndim < 2 or not fits:
        kind = gguf.GGMLQuantizationType.F32
      # Rows keep their scales wherever they are moved.
      data = gguf.quantize(value.astype(np.float32), kind)
      if own != name:
        stored[name] = gguf.dequantize(data, kind)
      if self.config["model_type"] == "llama":
        heads = {
          "attn_q": self.config["num_attention_heads"],
          "attn_k": self.config["num_key_value_heads"],
        }.get(own.rpartition(".")[0].rpartition(".")[2])
        if heads is not None:
          data = _neighbors(data, heads)
      writer.add_tensor(own, data, raw_dtype=kind)
    for file in self.directory.glob("*.safetensors*"):
      file.unlink()
    whole = self.directory / "model.safetensors"
    safetensors.numpy.save_file(stored, whole, metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return self.path


@pytest.fixture
def maker(tmp_path):
  """Makes small GGUF files; see `Maker`."""

  def make(*args, **kwargs):
    return Maker(tmp_path, *args, **kwargs)

  return make
