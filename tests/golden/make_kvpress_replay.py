"""Makes tests/golden/kvpress_replay/: what KVzipPress and KVgradPress keep.

The files are stored in the repository, so no test needs torch. To make them
again, in an environment of their own with torch 2.13 (CPU), transformers 5.2,
kvpress 0.5.5 and numpy:

  python tests/golden/make_kvpress_replay.py

The checkpoints and prompts are those of tiny_llama.py. They have no tokenizer:
in its place, each text that kvpress encodes has ids of its own.

  <checkpoint>.npz  for each press and length, <press>/<n>/scores, float32
                    [L, K, n], and for each share removed (in percent)
                    <press>/<n>/<percent>, the kept tokens, bool [L, K, n],
                    packed along n
  versions.json     what made it all
"""

import importlib.metadata
import json
import pathlib
import shutil
import sys
import tempfile
from unittest import mock

import kvpress
import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))
import tiny_llama  # noqa: E402

OUTPUT = HERE / "kvpress_replay"
# No whole number of chunks of 64; one chunk and three.
LENGTHS = (61, 173)
PERCENTS = (25, 50, 90)
PRESSES = {
  "plain": (kvpress.KVzipPress, {"chunk_size": 64}),
  "plus": (
    kvpress.KVzipPress,
    {"chunk_size": 64, "kvzip_plus_normalization": True},
  ),
  "sinks": (kvpress.KVzipPress, {"chunk_size": 50, "n_sink": 2}),
  "layerwise": (kvpress.KVzipPress, {"chunk_size": 64, "layerwise": True}),
  "grad": (kvpress.KVgradPress, {"chunk_size": 64}),
  "grad_layerwise": (
    kvpress.KVgradPress,
    {"chunk_size": 64, "layerwise": True},
  ),
}
PREFIX, SUFFIX = "<user>", "<assistant>"


class Tokenizer:
  """Stands for a tokenizer with a chat template."""

  chat_template = "given"

  def apply_chat_template(self, messages, **options):
    (message,) = messages
    return PREFIX + message["content"] + SUFFIX

  def encode(self, text, **options):
    name = {PREFIX: "prefix", SUFFIX: "suffix"}.get(text)
    if name is None:
      name = "later" if "starting with" in text else "first"
    return torch.tensor([tiny_llama.REQUEST[name]])


def load(name):
  with tempfile.TemporaryDirectory() as folder:
    tiny_llama.write(name, pathlib.Path(folder))
    read = transformers.AutoModelForCausalLM.from_pretrained
    return read(folder, dtype=torch.float32).eval()


def run(model, ids, press):
  """The scores, and the kept tokens, of a prompt."""
  found = {}
  compress = press.compress_post

  def listen(model):
    found["scores"] = press.score_val[:, 0].numpy().copy()
    compress(model)

  press.compress_post = listen
  for layer in model.model.layers:
    layer.self_attn.masked_key_indices = None
  with press(model):
    model.model(
      input_ids=torch.tensor([ids]), past_key_values=transformers.DynamicCache()
    )
  kept = np.ones(found["scores"].shape, bool)
  for layer, of_layer in zip(model.model.layers, kept, strict=True):
    _, heads, places = layer.self_attn.masked_key_indices
    of_layer[heads.numpy(), places.numpy()] = False
  return found["scores"], kept


def main() -> None:
  torch.set_num_threads(1)
  shutil.rmtree(OUTPUT, ignore_errors=True)
  OUTPUT.mkdir()
  patch = mock.patch.object(
    kvpress.presses.kvzip_press.AutoTokenizer,
    "from_pretrained",
    return_value=Tokenizer(),
  )
  for name in tiny_llama.SHAPES:
    model, arrays = load(name), {}
    for length in LENGTHS:
      ids = tiny_llama.chat(name, length)
      for press, (kind, options) in PRESSES.items():
        for percent in PERCENTS:
          made = kind(percent / 100, **options)
          with torch.no_grad(), patch:
            scores, kept = run(model, ids, made)
          arrays[f"{press}/{length}/scores"] = scores
          arrays[f"{press}/{length}/{percent}"] = np.packbits(kept, axis=-1)
    np.savez_compressed(OUTPUT / f"{name}.npz", **arrays)
  versions = {
    name: importlib.metadata.version(name)
    for name in ("kvpress", "numpy", "torch", "transformers")
  }
  text = json.dumps(versions, indent=2, sort_keys=True)
  (OUTPUT / "versions.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
