"""Makes tests/golden/kvpress_gates/: learned gates, and what they keep.

The files are stored in the repository, so no test needs torch. To make them
again, in an environment of their own with torch 2.15, transformers 5.2,
kvpress 0.5.5 and numpy:

  python tests/golden/make_kvpress_gates.py

The checkpoint and the prompts are those of tiny_llama.py. The weights are
random, and written by transformers and torch as the published ones are.

  kvzap_linear/, kvzap_mlp/  saved by KVzapModel.save_pretrained
  fast_kvzip/q2_dim16_sink16.pt  saved by torch.save, with what training adds
  kept.npz       <press>/<n>/scores, float32 [L, K, n] (those of Fast KVzip with
                 its forced ones); <press>/<n>/<percent removed or threshold>,
                 the kept tokens, bool [L, K, n], packed along n
  versions.json  what made it all
"""

import importlib.metadata
import json
import pathlib
import shutil
import sys
import tempfile

import kvpress
import numpy as np
import torch
import transformers
from kvpress.presses import fastkvzip_press, kvzap_press

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))
import tiny_llama  # noqa: E402

OUTPUT = HERE / "kvpress_gates"
NAME = "small"
LENGTHS = (77, 201)
PERCENTS = (30, 75)
# Shares of the scores that reach a threshold.
REACHED = (0.5, 0.2)
WINDOW = 19


def load_model():
  with tempfile.TemporaryDirectory() as folder:
    tiny_llama.write(NAME, pathlib.Path(folder))
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32).eval()


def sizes(model):
  fields = model.config
  return dict(
    input_dim=fields.hidden_size,
    output_dim=fields.num_key_value_heads,
    n_modules=fields.num_hidden_layers,
  )


def make_kvzap(model, kind):
  """Saves weights; returns a press that has them."""
  torch.manual_seed(len(kind))
  hidden = 6 if kind == "mlp" else None
  config = kvzap_press.KVzapConfig(hidden_dim=hidden, **sizes(model))
  made = kvzap_press.KVzapModel(config)
  for weight in made.parameters():
    torch.nn.init.normal_(weight, std=0.5)
  made.save_pretrained(OUTPUT / f"kvzap_{kind}")
  loaded = kvzap_press.KVzapModel.from_pretrained(OUTPUT / f"kvzap_{kind}")

  def press():
    found = kvpress.KVzapPress(model_type=kind)
    found.kvzap_model = loaded
    found.post_init_from_model = lambda model: None
    return found

  return press


def make_fast(model):
  """Saves weights as the authors' training does; returns a press."""
  torch.manual_seed(3)
  fields, path = model.config, OUTPUT / "fast_kvzip" / "q2_dim16_sink16.pt"
  group = fields.num_attention_heads // fields.num_key_value_heads
  assert group == 2
  modules = [
    fastkvzip_press.FastKVzipGate(
      layer,
      *(fields.hidden_size, fields.num_key_value_heads, group),
      torch.bfloat16 if layer == 0 else torch.float32,
    )
    for layer in range(fields.num_hidden_layers)
  ]
  for module in modules:
    for name, weight in module.named_parameters():
      mean = 1.0 if "norm" in name else 0.0
      torch.nn.init.normal_(weight, mean=mean, std=0.5)
  path.parent.mkdir()
  content = {
    "module": [module.state_dict() for module in modules],
    "loss": np.zeros((2, 4)),
    "acc": np.zeros((2, 4)),
  }
  torch.save(content, path)
  # The gates compute in the type of their first weight.
  modules[0].float()

  def press(removed, layerwise=False):
    found = kvpress.FastKVzipPress(removed, layerwise)
    found.gates = modules
    found.post_init_from_model = lambda model: None
    return found

  return press


def prefill(model, ids, press):
  """Runs a prompt; returns the tokens that the press has not masked."""
  layers = model.model.layers
  for layer in layers:
    layer.self_attn.masked_key_indices = None
  cache = transformers.DynamicCache()
  with press(model):
    model.model(torch.tensor([ids]), past_key_values=cache)
  heads = model.config.num_key_value_heads
  kept = np.ones((len(layers), heads, len(ids)), bool)
  for index, layer in enumerate(layers):
    masked = layer.self_attn.masked_key_indices
    if masked is not None:
      kept[index, np.asarray(masked[1]), np.asarray(masked[2])] = False
  return kept


def scores_of(model, ids, press):
  found, score = [], press.score

  def listen(*args, **kwargs):
    found.append(score(*args, **kwargs))
    return found[-1]

  press.score = listen
  # It removes nothing: a scorer is asked only if it removes something.
  dms = kvpress.DMSPress(press, threshold=-1e9)
  assert prefill(model, ids, dms).all()
  return torch.cat(found).numpy()


def main() -> None:
  torch.set_num_threads(1)
  torch.set_grad_enabled(False)
  shutil.rmtree(OUTPUT, ignore_errors=True)
  OUTPUT.mkdir()
  model, arrays = load_model(), {}
  for kind in ("linear", "mlp"):
    press = make_kvzap(model, kind)
    for length in LENGTHS:
      ids, case = tiny_llama.prompt(NAME, length), f"kvzap_{kind}/{length}"
      scores = scores_of(model, ids, press())
      arrays[f"{case}/scores"] = scores
      for share in REACHED:
        least = float(np.quantile(scores, 1 - share).astype(np.float16))
        dms = kvpress.DMSPress(
          press(), threshold=least, sliding_window_size=WINDOW
        )
        kept = prefill(model, ids, dms)
        arrays[f"{case}/{least}"] = np.packbits(kept, axis=-1)
      for percent in PERCENTS:
        inner = press()
        inner.compression_ratio = percent / 100
        ada = kvpress.AdaKVPress(inner, alpha_safeguard=0.2)
        kept = prefill(model, ids, ada)
        arrays[f"{case}/{percent}"] = np.packbits(kept, axis=-1)
  press = make_fast(model)
  for length in LENGTHS:
    ids, case = tiny_llama.prompt(NAME, length), f"fast_kvzip/{length}"
    for percent in PERCENTS:
      fast = press(percent / 100)
      kept = prefill(model, ids, fast)
      arrays[f"{case}/{percent}"] = np.packbits(kept, axis=-1)
      kept = prefill(model, ids, press(percent / 100, layerwise=True))
      case_by_layer = f"fast_kvzip:level=layer/{length}/{percent}"
      arrays[case_by_layer] = np.packbits(kept, axis=-1)
    arrays[f"{case}/scores"] = fast.score_val[:, 0].numpy()
  np.savez_compressed(OUTPUT / "kept.npz", **arrays)
  versions = {
    name: importlib.metadata.version(name)
    for name in ("kvpress", "numpy", "torch", "transformers")
  }
  text = json.dumps(versions, indent=2, sort_keys=True)
  (OUTPUT / "versions.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
