"""The weights of KVzap: a small network per layer, and its files."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import Array, Float, Int

from kvjax import files
from kvjax.errors import InputError
from kvjax.methods.gated import Gate
from kvjax.methods.stored import open_tensors, read_once

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_SIZES = ("input_dim", "output_dim", "n_modules")


@dataclasses.dataclass(frozen=True, eq=False)
class KVzapGate(Gate):
  """A network for each layer, from the layer's input to a score per KV head.

  The scores are W x + b, or W' gelu(W x + b) + b' with the exact GELU. They are
  natural logarithms.

  A folder has the files that are published for KVzap (arXiv 2601.07891), as
  nvidia/KVzap-mlp-Qwen3-8B on the Hugging Face hub: config.json with the sizes,
  and model.safetensors with layers.0.weight and layers.0.bias, or layers.0.0
  and layers.0.2 if there are two steps. `score_range` in config.json is an
  addition of kvjax.

  Attributes:
    steps: the weights [L, out, in] and biases [L, out] of one or two linear
      steps, float32.
    score_range: lowest and highest score of the texts that it was tested with;
      infinite if not known.
    path: the folder; empty if it was not read from files.
  """

  steps: tuple[tuple[Float[np.ndarray, "L _ _"], Float[np.ndarray, "L _"]], ...]
  score_range: tuple[float, float] = (-math.inf, math.inf)
  path: str = ""

  @classmethod
  def read(cls, path: str) -> "KVzapGate":
    """Reads a folder; see `read_once`.

    Raises:
      InputError: there are no such files, or they do not fit each other.
    """
    return read_once(path, _read, beside=(CONFIG,))

  @property
  def layers(self) -> int:
    """L, number of layers."""
    return len(self.steps[0][0])

  @property
  def width(self) -> int:
    """E, width of the layers' inputs."""
    return int(self.steps[0][0].shape[2])

  @property
  def heads(self) -> int:
    """K, number of KV heads."""
    return int(self.steps[-1][0].shape[1])

  @property
  def arrays(self) -> Any:
    """The steps."""
    return self.steps

  @staticmethod
  def predict(
    weights: Any, layer: Int[Array, ""], inputs: Float[Array, "B S E"]
  ) -> Float[Array, "B K S"]:
    """Predicts the scores of tokens in a layer, in float32."""
    found = inputs.astype(jnp.float32)
    for number, (matrix, biases) in enumerate(weights):
      found = found if number == 0 else jax.nn.gelu(found, approximate=False)
      found = jnp.einsum("bsi,oi->bso", found, matrix[layer])
      found = found + biases[layer][None, None]
    return jnp.swapaxes(found, 1, 2)

  def save(self, folder: pathlib.Path) -> None:
    """Writes the folder, which must exist, in the published layout.

    Raises:
      InputError: a file cannot be written.
    """
    places = [""] if len(self.steps) == 1 else [".0", ".2"]
    tensors = {
      f"layers.{layer}{place}.{name}": np.ascontiguousarray(array[layer])
      for place, (weights, biases) in zip(places, self.steps, strict=True)
      for name, array in (("weight", weights), ("bias", biases))
      for layer in range(self.layers)
    }
    config: dict[str, Any] = {
      "architectures": ["KVzapModel"],
      "model_type": "kvzap",
      "input_dim": self.width,
      "output_dim": self.heads,
      "hidden_dim": None
      if len(self.steps) == 1
      else int(self.steps[0][0].shape[1]),
      "n_modules": self.layers,
    }
    if all(map(math.isfinite, self.score_range)):
      config["score_range"] = list(self.score_range)
    content = safetensors.numpy.save(tensors, {"format": "pt"})
    files.write_bytes(folder / WEIGHTS, content)
    files.write_json(folder / CONFIG, config)


def _read(file: pathlib.Path) -> KVzapGate:
  """Reads the weights of a folder, given the larger file."""
  config_path = file.with_name(CONFIG)
  config = _config(config_path)
  inputs, heads, layers = (config[name] for name in _SIZES)
  hidden = config.get("hidden_dim")
  widths = [inputs, heads] if hidden is None else [inputs, hidden, heads]
  places = [""] if hidden is None else [".0", ".2"]
  with open_tensors(file) as opened:
    present = {*opened.keys()}

    def stack(
      suffix: str, shape: tuple[int, ...]
    ) -> Float[np.ndarray, "L ..."]:
      arrays = []
      for layer in range(layers):
        name = f"layers.{layer}{suffix}"
        if name not in present:
          raise InputError(
            f"{file} has no {name}, which {config_path} promises; "
            "kvjax train_gate writes such files."
          )
        with np.errstate(over="ignore"):  # It is not finite then.
          array = np.asarray(opened.get_tensor(name), np.float32)
        if array.shape != shape or not np.isfinite(array).all():
          raise InputError(
            f"{name} of {file} must be finite numbers {shape}, as "
            f"{config_path} says; it is {array.shape}."
          )
        arrays.append(array)
      return np.stack(arrays)

    steps = tuple(
      (stack(f"{place}.weight", (to, of)), stack(f"{place}.bias", (to,)))
      for place, of, to in zip(places, widths[:-1], widths[1:], strict=True)
    )
  low, high = config.get("score_range", (-math.inf, math.inf))
  return KVzapGate(steps, (float(low), float(high)), str(file.parent))


def _config(path: pathlib.Path) -> Mapping[str, Any]:
  """Reads the sizes.

  Raises:
    InputError: the file is missing, or says no sizes.
  """
  config = files.read_json(path)
  hidden, found = config.get("hidden_dim"), config.get("score_range", [0, 0])
  sizes = [config.get(name) for name in _SIZES]
  sizes += [] if hidden is None else [hidden]
  if not all(type(size) is int and size > 0 for size in sizes):
    raise InputError(
      f"{path} must have {', '.join(_SIZES)} and hidden_dim, whole numbers "
      "above 0 or null for the last, as the files of KVzap have."
    )
  two = isinstance(found, list) and len(found) == 2
  numbers = two and all(map(files.is_json_number, found))
  if not numbers or not -math.inf < found[0] <= found[1] < math.inf:
    raise InputError(
      f"score_range of {path} must be the lowest and the highest score, finite "
      "numbers."
    )
  return config
