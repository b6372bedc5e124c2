"""The weights of Fast KVzip: attention beside learned sinks, and its file."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import Array, Float, Int

from kvjax import files
from kvjax.addresses import local
from kvjax.errors import InputError
from kvjax.methods.gated import Gate
from kvjax.methods.stored import open_tensors, read_once
from kvjax.methods.torch_files import read_torch, stack_tensors

# What `FastKVzipGate.save` writes.
WEIGHTS = "model.safetensors"
# Number of axes of each weight of a layer.
RANKS = {
  "q_proj.weight": 2,
  "q_proj.bias": 1,
  "k_proj.weight": 2,
  "q_norm.weight": 1,
  "k_norm.weight": 1,
  "k_base": 4,
  "b": 3,
}
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class FastKVzipGate(Gate):
  """A gate for each layer, from the layer's input to a score per KV head.

  A token has G queries q and a key k of P numbers in each of the K KV heads,
  normalized by their root mean squares. With H learned keys h, its score is the
  mean over the queries of

    1 / (1 + sum_h exp(q.h / sqrt(P) - q.k / sqrt(P) - b)),

  the attention that a query pays to its own token beside the learned keys.

  Source: Kim et al., arXiv 2601.17668, Section 3.2, and their code. Their
  training adds b twice; with the published weights, their inference adds it
  once.

  Attributes:
    weights: float32 arrays by the names of the published file, with a leading
      axis of L layers.
    path: the file.
  """

  weights: Mapping[str, Float[np.ndarray, "L ..."]]
  path: str

  @classmethod
  def read(cls, path: str) -> "FastKVzipGate":
    """Reads a file; see `read_once`.

    Args:
      path: a file of https://huggingface.co/Jang-Hyun/Fast-KVzip, such as
        qwen3-8b/q4_dim16_sink16.pt, a file of `save`, or a folder with one of
        them.

    Raises:
      InputError: there is no such file, or it has no such weights.
    """
    return read_once(str(_file(path)), _read)

  @property
  def layers(self) -> int:
    """L, number of layers."""
    return len(self.weights["b"])

  @property
  def heads(self) -> int:
    """K, number of KV heads."""
    return int(self.weights["b"].shape[1])

  @property
  def width(self) -> int:
    """E, width of the layers' inputs."""
    return int(self.weights["q_proj.weight"].shape[2])

  @property
  def arrays(self) -> Any:
    """The weights."""
    return dict(self.weights)

  @staticmethod
  def predict(
    weights: Any, layer: Int[Array, ""], inputs: Float[Array, "B S E"]
  ) -> Float[Array, "B K S"]:
    """Computes the scores of tokens in a layer, in float32."""
    of_layer = {n: w[layer] for n, w in weights.items()}
    inputs = inputs.astype(jnp.float32)
    heads, _, group = of_layer["b"].shape
    size = of_layer["q_norm.weight"].shape[0]
    queries = jnp.einsum("bse,pe->bsp", inputs, of_layer["q_proj.weight"])
    queries = queries + of_layer["q_proj.bias"][None, None]
    queries = queries.reshape(*inputs.shape[:2], heads, group, size)
    queries = _normalize(queries, of_layer["q_norm.weight"])
    keys = jnp.einsum("bse,pe->bsp", inputs, of_layer["k_proj.weight"])
    keys = keys.reshape(*inputs.shape[:2], heads, size)
    keys = _normalize(keys, of_layer["k_norm.weight"])
    own = jnp.einsum("bskgp,bskp->bkgs", queries, keys) * size**-0.5
    own = own + of_layer["b"][:, 0][None, :, :, None]
    others = jnp.einsum("bskgp,khp->bkgsh", queries, of_layer["k_base"][:, 0])
    # 1 / (1 + e^x) is a sigmoid, which overflows nowhere.
    beside = jax.nn.logsumexp(others * size**-0.5, axis=-1)
    return jnp.mean(jax.nn.sigmoid(own - beside), axis=2)

  def save(self, folder: pathlib.Path) -> None:
    """Writes model.safetensors in a folder, which must exist.

    Its tensors are layers.0.b and so on, by the names of the published file.

    Raises:
      InputError: the file cannot be written.
    """
    tensors = {
      f"layers.{layer}.{name}": np.ascontiguousarray(of_layer)
      for name, array in self.weights.items()
      for layer, of_layer in enumerate(array)
    }
    content = safetensors.numpy.save(tensors, {"format": "pt"})
    files.write_bytes(folder / WEIGHTS, content)


def _normalize(
  x: Float[Array, "*B P"], gain: Float[Array, " P"]
) -> Float[Array, "*B P"]:
  """Divides by the root mean square."""
  squares = jnp.mean(x**2, axis=-1, keepdims=True)
  gain = gain.reshape((1,) * (x.ndim - 1) + (-1,))
  return x * jax.lax.rsqrt(squares + _EPSILON) * gain


def _file(path: str) -> pathlib.Path:
  """The file, or the only one of its kind in a folder."""
  folder = local(path)
  if not os.path.isdir(folder):  # False for names that are too long
    return folder
  found = sorted({*folder.glob("*.pt"), *folder.glob(WEIGHTS)})
  if len(found) != 1:
    raise InputError(
      f"{folder} has {len(found)} files named *.pt or {WEIGHTS}; name one that "
      "is published for Fast KVzip, or that kvjax train_gate --kind=fast_kvzip "
      "has written."
    )
  return found[0]


def _layers(file: pathlib.Path) -> Sequence[Any]:
  """Reads what a file has for each layer."""
  if file.suffix == ".safetensors":
    return _saved_layers(file)
  content = read_torch(file)
  layers = content.get("module") if isinstance(content, dict) else None
  if not isinstance(layers, list) or not layers:
    raise InputError(
      f"{file} has no list of layers named module, as the files that are "
      "published for Fast KVzip have."
    )
  return layers


def _saved_layers(file: pathlib.Path) -> Sequence[Mapping[str, Any]]:
  """Reads what `FastKVzipGate.save` writes."""
  with open_tensors(file) as opened:
    present = {*opened.keys()}
    layers: list[Mapping[str, Any]] = []
    while f"layers.{len(layers)}.b" in present:
      start = f"layers.{len(layers)}."
      names = [name for name in RANKS if start + name in present]
      layers.append({name: opened.get_tensor(start + name) for name in names})
  if not layers:
    raise InputError(
      f"{file} has no layers.0.b; kvjax train_gate --kind=fast_kvzip writes "
      "such a file."
    )
  return layers


def _read(file: pathlib.Path) -> FastKVzipGate:
  """Reads the weights of all layers."""
  layers = _layers(file)
  weights = {}
  for name, rank in RANKS.items():
    found = [x.get(name) if isinstance(x, dict) else None for x in layers]
    weights[name] = stack_tensors(file, name, found, rank, "layer")
  count, heads, _, group = weights["b"].shape
  size = weights["q_norm.weight"].shape[1]
  width = weights["k_proj.weight"].shape[2]
  sinks = weights["k_base"].shape[3]
  expected = {
    "q_proj.weight": (count, heads * group * size, width),
    "q_proj.bias": (count, heads * group * size),
    "k_proj.weight": (count, heads * size, width),
    "q_norm.weight": (count, size),
    "k_norm.weight": (count, size),
    "k_base": (count, heads, 1, sinks, size),
    "b": (count, heads, 1, group),
  }
  for name, shape in expected.items():
    if weights[name].shape != shape:
      raise InputError(
        f"{name} of {file} must have the shape {shape[1:]} in every layer, as "
        f"its other weights say; it has {weights[name].shape[1:]}."
      )
  return FastKVzipGate(weights, str(file))
