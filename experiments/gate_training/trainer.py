"""Trains the networks of all layers, in steps that resume."""

import dataclasses
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.numpy
from rich import progress

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments.gate_training import examples, fitting
from kvjax.experiments.run.claiming import claim
from kvjax.methods.kvzap_gate import KVzapGate
from kvjax.models.json_files import is_present, write_json
from kvjax.models.pretrained import Pretrained
from kvjax.prompts import bucket

VALIDATION = "validation.json"
# One text of so many is for the test.
_TESTED = 10


@dataclasses.dataclass(frozen=True)
class Fitted:
  """The network of a layer.

  Attributes:
    steps: its linear steps.
    r2: share of the variance that it explains in texts it has not seen.
    low: its lowest score of these texts.
    high: its highest.
  """

  steps: tuple[fitting.Step, ...]
  r2: float
  low: float
  high: float


class Trainer:
  """A run, which resumes from its folder.

  Every text that has been replayed is a file in `examples`, every layer that
  has been fitted one in `layers`. Both folders are removed at the end.
  """

  def __init__(
    self,
    output: pathlib.Path,
    lm: Pretrained,
    rows: Sequence[Sequence[int]],
    tokens: int,
    recipe: fitting.Recipe,
    source: Mapping[str, Any],
  ):
    """Claims a folder.

    Args:
      output: a folder, which is created if it does not exist.
      lm: the model; on a mesh, with the mesh in context.
      rows: tokens of at least two texts.
      tokens: maximum number of tokens that are learned of each.
      recipe: the hyperparameters.
      source: identifies the model and the texts.

    Raises:
      InputError: the folder has another run or another model, or the layers of
        the model differ in their KV heads.
    """
    layers = lm.model.geometry.layers
    self._scored = [n for n, spec in enumerate(layers) if spec.compressible]
    heads = {layers[n].kv_heads for n in self._scored}
    if len(heads) != 1:
      raise InputError(
        "A gate scores the same number of KV heads in all layers; this model "
        f"has layers with {' and '.join(map(str, sorted(heads))) or 'none'}."
      )
    (self._heads,) = heads
    self._output, self._lm, self._rows = output, lm, rows
    self._tokens, self._recipe = tokens, recipe
    settings = dict(source) | dataclasses.asdict(recipe) | {"tokens": tokens}
    output.mkdir(parents=True, exist_ok=True)
    claim(output / "run.json", settings)

  def run(self) -> dict[str, Any]:
    """Does what is left; returns what validation.json says."""
    began = time.monotonic()
    done = self._output / VALIDATION
    if is_present(done):
      result: dict[str, Any] = files.parse_json(files.read_text(done))
      return result
    paths = self._replay()
    # Spread over the documents, and never all of them.
    tested = [p for n, p in enumerate(paths) if n % _TESTED == 1]
    learned = [path for path in paths if path not in tested]
    fitted = {
      layer: self._layer(index, layer, learned, tested)
      for index, layer in _shown(list(enumerate(self._scored)), "fitting")
    }
    summary = {
      "r2": {str(layer): each.r2 for layer, each in fitted.items()},
      "texts": len(learned),
      "tested_texts": len(tested),
      "seconds": round(time.monotonic() - began, 1),
    }
    self._gate(fitted).save(self._output)
    write_json(done, summary)
    for name in ("examples", "layers"):
      shutil.rmtree(self._output / name)
    return summary

  def _replay(self) -> list[pathlib.Path]:
    """Replays the texts that are left; returns the files of all."""
    folder = self._output / "examples"
    folder.mkdir(exist_ok=True)
    padded = bucket(max(map(len, self._rows)))
    paths = []
    for number, row in _shown(list(enumerate(self._rows)), "replaying"):
      path = folder / f"{number:06}.safetensors"
      if not is_present(path):
        seed = (self._recipe.seed, number)
        examples.write(path, self._lm, row, padded, self._tokens, seed)
      paths.append(path)
    return paths

  def _layer(
    self,
    index: int,
    layer: int,
    learned: Sequence[pathlib.Path],
    tested: Sequence[pathlib.Path],
  ) -> Fitted:
    """Fits a layer and tests it, unless its file is there."""
    folder = self._output / "layers"
    folder.mkdir(exist_ok=True)
    path = folder / f"{layer:04}.safetensors"
    if not is_present(path):
      steps = fitting.fit(examples.read(learned, index), self._recipe, layer)
      held_out = examples.read(tested, index)
      predicted = fitting.predict(steps, held_out.inputs)
      arrays = {
        f"{kind}{number}": np.ascontiguousarray(array)
        for number, step in enumerate(steps)
        for kind, array in zip(("weight", "bias"), step, strict=True)
      }
      numbers = {
        "r2": fitting.mean_r2(predicted, held_out.scores),
        "low": float(predicted.min()),
        "high": float(predicted.max()),
      }
      content = safetensors.numpy.save(arrays, {"numbers": json.dumps(numbers)})
      files.write_bytes(path, content)
    with safetensors.safe_open(path, framework="numpy") as opened:
      found = json.loads(opened.metadata()["numbers"])
      steps = tuple(
        (opened.get_tensor(f"weight{n}"), opened.get_tensor(f"bias{n}"))
        for n in range(len([*opened.keys()]) // 2)
      )
    print(f"layer {layer}: R2 {found['r2']:.3f}", flush=True)
    return Fitted(steps, **found)

  def _gate(self, fitted: Mapping[int, Fitted]) -> KVzapGate:
    """Joins the layers; those that are not scored have zeros."""
    blank = tuple(
      (np.zeros_like(weights), np.zeros_like(biases))
      for weights, biases in next(iter(fitted.values())).steps
    )
    layers = [
      fitted[layer].steps if layer in fitted else blank
      for layer in range(self._lm.model.geometry.num_layers)
    ]
    steps = tuple(
      (np.stack([w for w, _ in step]), np.stack([b for _, b in step]))
      for step in zip(*layers, strict=True)
    )
    return KVzapGate(
      steps,
      (
        min(each.low for each in fitted.values()),
        max(each.high for each in fitted.values()),
      ),
    )


def _shown[Item](items: Sequence[Item], name: str) -> Any:
  """Shows a progress bar on a terminal."""
  return progress.track(items, name, disable=not sys.stdout.isatty())
