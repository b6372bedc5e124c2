"""Makes tests/golden/kvpress/: what NVIDIA's kvpress scores and keeps.

The files are stored in the repository, so no test needs torch. To make them
again, in an environment of their own with torch 2.13 (CPU), transformers 5.2,
kvpress 0.5.5 and numpy:

  python tests/golden/make_kvpress.py

There is one random Llama for each prompt length n; what its second layer sees
is the same for every press:

  inputs_<n>.npz  queries [N, n, D] and keys [K, n, D] rotated, values and
                  keys_unrotated [K, n, D], float32
  <press>.npz     for each variant of the press's options, length and share
                  removed (in percent): <variant>_<n>_<percent>_scores
                  float32 [K, n] and ..._kept int16 [K, m], ascending positions
  sketches.npz    the sketches [K, D, k] that kvpress would have drawn
  versions.json   what made it all

noncausal.npz also has ..._mass [N, n], the column sums of attention before
kvpress scales, pools and standardizes them.

The presses run as users run them, as hooks on a model's prefill; their `score`
is only listened to, and what they keep is read from the model's cache.
Everything runs with scaled-dot-product attention, where presses compute the
attention weights that they need, but for ObservedAttentionPress, which takes
the model's own.
"""

import importlib.metadata
import json
import pathlib
import shutil
from unittest import mock

import kvpress
import kvpress.utils
import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

OUTPUT = pathlib.Path(__file__).parent / "kvpress"
# Multiples of 12; less Compactor's 12 protected tokens, multiples of 24: its
# chunks can be whole, which the padding of the last one in kvpress requires.
LENGTHS = (60, 132, 300)
PERCENTS = (25, 50, 75, 90)
LAYER = 1
SKETCH_DIMS = (8, 48)
VOCABULARY = 80

# Per file: the press, and the options of each of its variants.
PRESSES = {
  "knorm": (kvpress.KnormPress, {"default": {}}),
  "keydiff": (kvpress.KeyDiffPress, {"default": {}}),
  "snapkv": (
    kvpress.SnapKVPress,
    {"default": {}, "window16": {"window_size": 16, "kernel_size": 7}},
  ),
  "tova": (kvpress.TOVAPress, {"default": {}}),
  "observed": (kvpress.ObservedAttentionPress, {"default": {}}),
  "streaming": (kvpress.StreamingLLMPress, {"default": {}}),
  "lagkv": (
    kvpress.LagKVPress,
    {
      "default": {},
      "lag16": {"lag_size": 16},
      "lag16cross": {"lag_size": 16, "cross_scoring": True},
    },
  ),
  "noncausal": (
    kvpress.NonCausalAttnPress,
    {"default": {}, "chunk12": {"chunk_size": 12}},
  ),
  "leverage": (
    kvpress.LeverageScorePress,
    {"default": {}, "sketch8": {"sketch_dimension": 8}},
  ),
  "compactor": (
    kvpress.CompactorPress,
    {
      "chunk24": {"chunk_size": 24},
      "blend": {"chunk_size": 24, "sketch_dimension": 8, "blending": 0.35},
    },
  ),
}


def build(length: int):
  """A model whose attention is far from uniform and whose keys have a mean."""
  config = transformers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    attention_bias=True,
  )
  model = transformers.LlamaForCausalLM(config).eval()
  random = np.random.default_rng(length)
  with torch.no_grad():
    for name, parameter in sorted(model.named_parameters()):
      values = random.standard_normal(parameter.shape)
      if name.endswith("norm.weight"):
        values = 1 + 0.3 * values
      elif name.endswith("bias"):
        values = 0.5 * values
      elif "embed_tokens" not in name:
        values = values / np.sqrt(parameter.shape[1])
      parameter.copy_(torch.from_numpy(values.astype(np.float32)))
  ids = random.integers(3, VOCABULARY, (1, length))
  return model, torch.from_numpy(ids)


def projections(module, hidden_states, keys, values, position_embeddings):
  """What the layer's attention saw, as arrays without the batch axis."""
  queries = kvpress.utils.get_prerope_query_states(module, hidden_states)
  unrotated = kvpress.utils.get_prerope_key_states(module, hidden_states)
  queries, rotated = apply_rotary_pos_emb(
    queries, unrotated, *position_embeddings
  )
  assert torch.equal(rotated, keys)
  parts = {
    "queries": queries,
    "keys": keys,
    "values": values,
    "keys_unrotated": unrotated,
  }
  return {name: x[0].numpy() for name, x in parts.items()}


def run(model, ids, press):
  """Prefills under a press; its inputs, scores and kept positions."""
  found = {}
  score = press.score
  attend = kvpress.NonCausalAttnPress.non_causal_chunked_attn

  def listen(module, hidden_states, keys, values, attentions, kwargs):
    scores = score(module, hidden_states, keys, values, attentions, kwargs)
    if module.layer_idx == LAYER:
      rotary = kwargs["position_embeddings"]
      found["scores"] = scores[0].numpy()
      found["inputs"] = projections(module, hidden_states, keys, values, rotary)
    return scores

  def listen_to_mass(*args):
    mass = attend(*args)
    found["mass"] = mass[0].numpy()  # That of the last layer stays.
    return mass

  def drawn(*size, **kwargs):
    return torch.from_numpy(normals(size[-1]))[None].reshape(size)

  press.score = listen
  cache = transformers.DynamicCache()
  with (
    torch.no_grad(),
    mock.patch.object(
      kvpress.NonCausalAttnPress,
      "non_causal_chunked_attn",
      staticmethod(listen_to_mass),
    ),
    mock.patch.object(torch, "randn", drawn),
    press(model),
  ):
    model.model(input_ids=ids, past_key_values=cache)
  survivors = cache.layers[LAYER].keys[0].numpy()
  found["kept"] = positions(survivors, found["inputs"]["keys"])
  return found


def positions(survivors, keys):
  """Where the kept keys [K, m, D] stood among all keys [K, n, D]."""
  same = (survivors[:, :, None] == keys[:, None]).all(axis=-1)
  assert (same.sum(axis=-1) == 1).all()
  return np.sort(same.argmax(axis=-1), axis=-1).astype(np.int16)


def normals(width: int):
  """Stands for the normal numbers that kvpress draws, [K, D, k]."""
  random = np.random.default_rng(width)
  return random.standard_normal((2, 16, width)).astype(np.float32)


def make_length(length: int, files: dict) -> None:
  model, ids = build(length)
  inputs = None
  for name, (press_type, variants) in PRESSES.items():
    observed = press_type is kvpress.ObservedAttentionPress
    model.set_attn_implementation("eager" if observed else "sdpa")
    for variant, options in variants.items():
      if name == "snapkv" and press_type(**options).window_size >= length:
        continue  # kvpress refuses it.
      for percent in PERCENTS:
        press = press_type(compression_ratio=percent / 100, **options)
        found = run(model, ids, press)
        inputs = inputs or found["inputs"]
        for part, seen in found["inputs"].items():
          # Two implementations of attention, two roundings.
          np.testing.assert_allclose(seen, inputs[part], rtol=0, atol=2e-5)
        case = f"{variant}_{length}_{percent}"
        files[name][f"{case}_scores"] = found["scores"]
        files[name][f"{case}_kept"] = found["kept"]
        if name == "noncausal":
          files[name][f"{variant}_{length}_mass"] = found["mass"]
  files[f"inputs_{length}"] = inputs


def main() -> None:
  torch.set_num_threads(1)
  files: dict = {name: {} for name in PRESSES}
  for length in LENGTHS:
    make_length(length, files)
  files["sketches"] = {
    str(k): normals(k) / np.float32(np.sqrt(k)) for k in SKETCH_DIMS
  }
  shutil.rmtree(OUTPUT, ignore_errors=True)
  OUTPUT.mkdir()
  for name, arrays in files.items():
    np.savez_compressed(OUTPUT / f"{name}.npz", **arrays)
  versions = {
    name: importlib.metadata.version(name)
    for name in ("kvpress", "numpy", "torch", "transformers")
  }
  text = json.dumps(versions, indent=2, sort_keys=True)
  (OUTPUT / "versions.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
