"""Small GGUF files, as llama.cpp makes them of the golden models; a cache."""

import json
import math
import os
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
# Gemma 3 has two norms more, and another one before the MLP.
_GEMMA3_NAMES = _NAMES | {
  "post_attention_layernorm": "post_attention_norm",
  "pre_feedforward_layernorm": "ffn_norm",
  "post_feedforward_layernorm": "post_ffw_norm",
}

_KNOWN = ("model.", "lm_head.")


def _own_name(name, names):
  module, _, kind = name.rpartition(".")
  start = ""
  if module.startswith("model.layers."):
    _, _, layer, module = module.split(".", 3)
    start = f"blk.{layer}."
  return f"{start}{names[module]}.{kind}"


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


def _pieces(count):
  """A vocabulary by scores of few letters: tokens, their kinds and scores."""
  special = ["<pad>", "</s>", "<s>", "<unk>", "<|turn|>"]
  users = ["\n", "  "]
  pieces = ["ab", "\u2581a", "abc", "\u2581ab", "\u2581", *"abcdefghi<>0123"]
  tokens = [*special, *users, *pieces]
  kinds = [CONTROL] * len(special) + [gguf.TokenType.USER_DEFINED] * len(users)
  kinds += [gguf.TokenType.NORMAL] * len(pieces)
  scores = [-1000.0] * (len(special) + len(users))
  scores += [-float(rank) for rank in range(len(pieces))]
  rest = range(count - len(tokens))
  tokens += [f"<0x{byte:02X}>" for byte in rest]
  return (
    tokens,
    [*kinds, *[gguf.TokenType.BYTE for _ in rest]],
    scores + [0.0 for _ in rest],
  )


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
    self.gemma3 = self.config["model_type"] == "gemma3_text"
    self.kind = gguf.GGMLQuantizationType[kind]
    self.tensors = {}
    for file in self.directory.glob("*.safetensors"):
      self.tensors |= safetensors.numpy.load_file(file)
    self.fields = self._fields()

  def _fields(self):
    config = self.config
    kind = "gemma3" if self.gemma3 else config["model_type"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
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
    } | self._tokenizer_fields()
    if self.gemma3:
      window = f"{kind}.attention.sliding_window"
      fields[window] = config["sliding_window"]
      fields[f"{window}_pattern"] = config["sliding_window_pattern"]
    scaling = f"{kind}.rope.scaling"
    if rope["rope_type"] in ("linear", "yarn"):
      fields[f"{scaling}.type"] = rope["rope_type"]
      fields[f"{scaling}.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
      original = rope["original_max_position_embeddings"]
      fields[f"{scaling}.original_context_length"] = original
    return fields

  def _tokenizer_fields(self):
    count, fields = self.config["vocab_size"], {}
    if self.gemma3:
      tokens, kinds, scores = _pieces(count)
      fields |= {"model": "llama", "pre": "default", "scores": scores}
      fields["add_space_prefix"] = False
    else:
      tokens, kinds, merges = _tokens(count)
      llama = self.config["model_type"] == "llama"
      fields |= {"model": "gpt2", "pre": "llama-bpe" if llama else "qwen2"}
      fields["merges"] = merges
    fields |= {
      "tokens": tokens,
      "token_type": [int(k) for k in kinds],
      "bos_token_id": tokens.index("<s>"),
      "eos_token_id": tokens.index("</s>"),
      "eot_token_id": tokens.index("<|turn|>"),
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}

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
      names = _GEMMA3_NAMES if self.gemma3 else _NAMES
      own = _own_name(name, names) if name.startswith(_KNOWN) else name
      # Gemma adds 1 to what a norm multiplies by; the file has the sum.
      added = np.float32(self.gemma3 and own.endswith("_norm.weight"))
      kind = self.kind
      fits = value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
      if value.ndim < 2 or not fits:
        kind = gguf.GGMLQuantizationType.F32
      # Rows keep their scales wherever they are moved.
      data = gguf.quantize(value.astype(np.float32) + added, kind)
      if own != name:
        stored[name] = gguf.dequantize(data, kind) - added
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


@pytest.fixture
def cache(monkeypatch, tmp_path):
  """The user's cache, and pip with nothing but a folder of wheels."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  (tmp_path / "wheels").mkdir()
  for name in [name for name in os.environ if name.startswith("PIP_")]:
    monkeypatch.delenv(name)
  monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
  return tmp_path / "cache" / "kvjax" / "models"
