"""Made-up weights of learned gates, written in their published layouts."""

import atexit
import collections
import functools
import io
import json
import pathlib
import pickle
import shutil
import sys
import tempfile
import types
import zipfile
from unittest import mock

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


def fast_kvzip_layers(inputs, heads, layers, group=2, size=4, sinks=3, seed=0):
  """State dictionaries of all layers, as float32."""
  draw = np.random.default_rng(seed)

  def normal(*shape, scale=1.0):
    return (draw.standard_normal(shape) * scale).astype(np.float32)

  return [
    collections.OrderedDict(
      {
        "k_base": normal(heads, 1, sinks, size),
        "b": normal(heads, 1, group),
        "q_proj.weight": normal(heads * group * size, inputs),
        "q_proj.bias": normal(heads * group * size),
        "k_proj.weight": normal(heads * size, inputs),
        "q_norm.weight": 1 + normal(size, scale=0.1),
        "k_norm.weight": 1 + normal(size, scale=0.1),
      }
    )
    for _ in range(layers)
  ]


def torch_bytes(content):
  """What torch.save would write of arrays in lists and dictionaries."""
  torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")

  def _rebuild_tensor_v2(*arguments):
    raise NotImplementedError

  class FloatStorage:
    pass

  for module, owned in ((utils, _rebuild_tensor_v2), (torch, FloatStorage)):
    owned.__module__, owned.__qualname__ = module.__name__, owned.__name__
    setattr(module, owned.__name__, owned)
  storages = []

  class Storage:
    def __init__(self, array):
      storages.append(array)
      self.number, self.size = len(storages) - 1, array.size

  class Pickler(pickle.Pickler):
    def persistent_id(self, value):
      if not isinstance(value, Storage):
        return None
      return ("storage", FloatStorage, str(value.number), "cpu", value.size)

    def reducer_override(self, value):
      if not isinstance(value, np.ndarray) or value.dtype != np.float32:
        return NotImplemented
      strides = tuple(by // value.itemsize for by in value.strides)
      turned = value.T if value.flags.f_contiguous else value
      storage = Storage(np.ascontiguousarray(turned))
      return _rebuild_tensor_v2, (
        *(storage, 0, value.shape, strides, False),
        collections.OrderedDict(),
      )

  data = io.BytesIO()
  with mock.patch.dict(sys.modules, {"torch": torch, "torch._utils": utils}):
    Pickler(data, 2).dump(content)
  return torch_archive(data.getvalue(), [x.tobytes() for x in storages])


def torch_archive(data, storages, compression=zipfile.ZIP_STORED):
  """A file as torch.save lays it out, of a pickle and its storages."""
  file = io.BytesIO()
  with zipfile.ZipFile(file, "w", compression) as archive:
    archive.writestr("gate/data.pkl", data)
    for number, content in enumerate(storages):
      archive.writestr(f"gate/data/{number}", content)
  return file.getvalue()


def write_fast_kvzip(path, inputs, heads, layers, **sizes):
  """Writes a file as Jang-Hyun/Fast-KVzip has it; returns its path."""
  content = {
    "module": fast_kvzip_layers(inputs, heads, layers, **sizes),
    # Of the training; nobody reads it.
    "loss": np.zeros(3),
  }
  pathlib.Path(path).write_bytes(torch_bytes(content))
  return str(path)


@functools.cache
def made_up_fast_kvzip(inputs, heads, layers):
  """The path of weights for a model of these sizes, for as long as it runs."""
  path = _scratch() / f"fast-{inputs}-{heads}-{layers}.pt"
  return write_fast_kvzip(path, inputs, heads, layers)
