"""Random checkpoints that goldens and tests build alike, without torch.

Their attention is far from uniform and their keys have a mean.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy

VOCABULARY = 96
HEAD_DIM = 16
# Of two checkpoints, the second is for methods that were fitted to neither.
SHAPES = {
  "small": dict(num_hidden_layers=4, num_attention_heads=4, kv_heads=2),
  "held_out": dict(num_hidden_layers=3, num_attention_heads=6, kv_heads=3),
}
# The ids of a chat template, longer than kvpress's sinks, and of the requests
# to repeat a prompt.
REQUEST = {
  "prefix": (1, 7, 8, 9, 10, 11, 12),
  "first": (20, 21, 22, 23),
  "later": (24, 25, 26, 27, 28, 29),
  "suffix": (13, 14),
}


def config(name: str) -> dict:
  """The fields of config.json."""
  shape = dict(SHAPES[name])
  return dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=64,
    num_key_value_heads=shape.pop("kv_heads"),
    head_dim=HEAD_DIM,
    attention_bias=True,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    max_position_embeddings=2048,
    bos_token_id=1,
    eos_token_id=2,
    **shape,
  )


def weights(name: str) -> dict[str, np.ndarray]:
  """The weights by their names in a checkpoint, float32."""
  fields = config(name)
  random = np.random.default_rng(sorted(SHAPES).index(name))
  hidden, middle = fields["hidden_size"], fields["intermediate_size"]
  queries = fields["num_attention_heads"] * HEAD_DIM
  keys = fields["num_key_value_heads"] * HEAD_DIM

  def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * random.standard_normal(shape)).astype(np.float32)

  def matrix(out: int, width: int) -> np.ndarray:
    return draw(out, width, scale=width**-0.5)

  def norm() -> np.ndarray:
    return 1 + draw(hidden, scale=0.3)

  made = {
    "model.embed_tokens.weight": draw(VOCABULARY, hidden),
    "lm_head.weight": matrix(VOCABULARY, hidden),
    "model.norm.weight": norm(),
  }
  for layer in range(fields["num_hidden_layers"]):
    start = f"model.layers.{layer}."
    for part, out, width, bias in (
      ("self_attn.q_proj", queries, hidden, True),
      ("self_attn.k_proj", keys, hidden, True),
      ("self_attn.v_proj", keys, hidden, True),
      ("self_attn.o_proj", hidden, queries, True),
      ("mlp.gate_proj", middle, hidden, False),
      ("mlp.up_proj", middle, hidden, False),
      ("mlp.down_proj", hidden, middle, False),
    ):
      made[f"{start}{part}.weight"] = matrix(out, width)
      if bias:
        made[f"{start}{part}.bias"] = draw(out, scale=0.5)
    for part in ("input_layernorm", "post_attention_layernorm"):
      made[f"{start}{part}.weight"] = norm()
  return made


def write(name: str, directory: pathlib.Path) -> None:
  """Writes a checkpoint without a tokenizer."""
  directory.mkdir(parents=True, exist_ok=True)
  text = json.dumps(config(name), indent=2)
  (directory / "config.json").write_text(text + "\n", encoding="utf-8")
  path = directory / "model.safetensors"
  safetensors.numpy.save_file(weights(name), path, {"format": "pt"})


def prompt(name: str, length: int) -> list[int]:
  """A random prompt."""
  random = np.random.default_rng([sorted(SHAPES).index(name), length])
  ids: list[int] = random.integers(3, VOCABULARY, length).tolist()
  return ids


def chat(name: str, length: int) -> list[int]:
  """A random prompt after the ids of a chat template."""
  return [*REQUEST["prefix"], *prompt(name, length)][:length]


def normals(heads: int, width: int) -> np.ndarray:
  """Stands for the normal numbers of a sketch, [K, D, k]."""
  random = np.random.default_rng(width)
  return random.standard_normal((heads, HEAD_DIM, width)).astype(np.float32)
