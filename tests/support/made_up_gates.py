"""Made-up weights of learned gates, written in their published layouts."""

import atexit
import functools
import json
import pathlib
import shutil
import tempfile

import numpy as np
import safetensors.numpy


def kvzap_tensors(inputs, heads, layers, hidden=None, seed=0):
  """Weights by their names in the published files, as float32."""
  draw = np.random.default_rng(seed)
  widths = [inputs, heads] if hidden is None else [inputs, hidden, heads]
  places = [""] if hidden is None else [".0", ".2"]
  tensors = {}
  for layer in range(layers):
    for place, of, to in zip(places, widths[:-1], widths[1:], strict=True):
      name = f"layers.{layer}{place}"
      weights = draw.standard_normal((to, of)) * of**-0.5
      tensors[f"{name}.weight"] = weights.astype(np.float32)
      tensors[f"{name}.bias"] = draw.standard_normal(to).astype(np.float32)
  return tensors


def write_kvzap(folder, inputs, heads, layers, hidden=None, **fields):
  """Writes a folder as nvidia/KVzap-mlp-Qwen3-8B has it; returns its path."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  tensors = kvzap_tensors(inputs, heads, layers, hidden)
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  config = {
    "architectures": ["KVzapModel"],
    "dtype": "float32",
    "hidden_dim": hidden,
    "input_dim": inputs,
    "model_type": "kvzap",
    "n_modules": layers,
    "output_dim": heads,
    "transformers_version": "4.57.3",
  }
  (folder / "config.json").write_text(json.dumps(config | fields))
  return str(folder)


@functools.cache
def _scratch():
  folder = tempfile.mkdtemp(prefix="kvjax-gates-")
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  return pathlib.Path(folder)


@functools.cache
def made_up_kvzap(inputs, heads, layers):
  """The path of weights for a model of these sizes, for as long as it runs."""
  return write_kvzap(
    _scratch() / f"kvzap-{inputs}-{heads}-{layers}", inputs, heads, layers, 8
  )
