"""Trains the gates of all layers, in steps that resume."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.numpy
from absl import logging

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments.gate_training import examples
from kvjax.experiments.gate_training.learner import Learner, Weights, mean_r2
from kvjax.experiments.run import environment, multihost, outputs
from kvjax.experiments.run.claiming import claim
from kvjax.experiments.run.processes import Processes
from kvjax.experiments.run.progress_bar import track
from kvjax.files import is_present, read_json, write_json
from kvjax.models.pretrained import Pretrained
from kvjax.prompts import bucket

VALIDATION = "validation.json"
_RUN = "run.json"
# One text of so many is for the test.
_TESTED = 10


@dataclasses.dataclass(frozen=True)
class Fitted:
  """The gate of a layer.

  Attributes:
    weights: its weights.
    r2: share of the variance that it explains in texts it has not seen.
    low: its lowest prediction for these texts.
    high: its highest.
  """

  weights: Weights
  r2: float
  low: float
  high: float


class Trainer:
  """A run, which resumes from its folder.

  Every text that has been replayed and every layer that has been fitted is a
  file in `.train_gate`. These files are removed at the end. Of several hosts,
  all replay texts, and the first one has the folder and fits the layers; all
  must call the same methods.
  """

  def __init__(
    self,
    output: pathlib.Path,
    lm: Pretrained,
    rows: Sequence[Sequence[int]],
    tokens: int,
    learner: Learner,
    source: Mapping[str, Any],
  ):
    """Claims a folder.

    Args:
      output: a folder, which is created if it does not exist.
      lm: the model; on a mesh, with the mesh in context.
      rows: tokens of at least two texts.
      tokens: maximum number of tokens that are learned of each.
      learner: the kind of the gates and its hyperparameters.
      source: identifies the model and the texts.

    Raises:
      InputError: the folder has another run, another model or somebody else's
        `.train_gate`, or the layers of the model differ in their KV heads.
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
    began = time.monotonic()
    self._output, self._lm, self._rows = output, lm, rows
    self._tokens, self._learner = tokens, learner
    settings = dict(source) | dataclasses.asdict(learner) | {"tokens": tokens}
    self._work = output / ".train_gate"
    multihost.on_first(lambda: self._claim(settings))
    device = environment.device()
    self._processes = Processes(self._work, device, began)

  def _claim(self, settings: Mapping[str, Any]) -> None:
    """Claims the folder; see `__init__`."""
    if self._work.exists() and not is_present(self._output / _RUN):
      raise InputError(
        f"{self._work} is of no run, and a run would write to it; choose "
        "another --output."
      )
    self._output.mkdir(parents=True, exist_ok=True)
    claim(self._output / _RUN, settings)

  def run(self) -> dict[str, Any]:
    """Does what is left; returns what validation.json says."""
    left = multihost.from_first(self._list_left)
    if left:
      self._replay(json.loads(left))
      for index, layer in track(list(enumerate(self._scored)), "fitting"):
        multihost.on_first(functools.partial(self._fit, index, layer))
    return json.loads(multihost.from_first(self._finish))

  def _list_left(self) -> bytes:
    """Lists the texts that are left; empty if the whole run is done."""
    if self._is_done():
      return b""
    self._work.mkdir(exist_ok=True)
    replayed = [*map(is_present, self._text_files())]
    logging.info("%s has %d replayed parts already", self._work, sum(replayed))
    return json.dumps(
      [n for n, done in enumerate(replayed) if not done]
    ).encode()

  def _finish(self) -> bytes:
    """Writes the gates of all layers, if they are not there, and cleans up.

    Returns:
      What validation.json says.
    """
    done = self._output / VALIDATION
    if not self._is_done():
      fitted = {layer: self._read(layer) for layer in self._scored}
      learned, tested = self._split()
      self._save(fitted)
      logging.info("Wrote the gates to %s", self._output)
      summary = {
        "r2": {str(layer): each.r2 for layer, each in fitted.items()},
        "texts": len(learned),
        "tested_texts": len(tested),
        "seconds": self._processes.summary()["seconds"]["total"],
      }
      write_json(done, summary)
    self._clean()
    return json.dumps(read_json(done)).encode()

  def _text_files(self) -> list[pathlib.Path]:
    """The file of each text."""
    names = (f"text-{n:06}.safetensors" for n in range(len(self._rows)))
    return [self._work / name for name in names]

  def _is_done(self) -> bool:
    names = *self._learner.files, VALIDATION
    return all(is_present(self._output / name) for name in names)

  def _split(self) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """The files of the texts to learn from and to test with."""
    paths = self._text_files()
    # Spread over the documents, and never all of them.
    tested = [p for n, p in enumerate(paths) if n % _TESTED == 1]
    return [path for path in paths if path not in tested], tested

  def _layer_file(self, layer: int) -> pathlib.Path:
    return self._work / f"layer-{layer:04}.safetensors"

  def _clean(self) -> None:
    """Removes what the run has written on the way, and nothing else."""
    for path in (*self._text_files(), *map(self._layer_file, self._scored)):
      path.unlink(missing_ok=True)
      files.part_of(path).unlink(missing_ok=True)
    self._processes.remove()
    with contextlib.suppress(OSError):
      # It may have a file of the user's.
      self._work.rmdir()

  def _replay(self, left: Sequence[int]) -> None:
    """Replays texts; the first host writes a file of each."""
    padded = bucket(max(map(len, self._rows)))

    def replay(number: int) -> Iterator[list[bytes]]:
      row, began = self._rows[number], time.monotonic()
      content = examples.make(
        self._lm, row, padded, self._tokens, number, self._learner
      )
      logging.info(
        "Replayed part %d of %d tokens, padded to %d, in %.1f s",
        *(number, len(row), padded, time.monotonic() - began),
      )
      yield [content]

    # A host has one text at a time.
    contents = multihost.share(
      left, replay, b"".join, lambda content: [content] if content else []
    )
    paths = self._text_files()
    for number in track(left, "replaying"):
      (content,) = next(contents)
      outputs.write_bytes(paths[number], content)
      self._processes.note()
    # All hosts learn whether the last one could be written.
    multihost.gather(b"")

  def _fit(self, index: int, layer: int) -> None:
    """Fits a layer, tests it and writes its file, unless that is there."""
    path = self._layer_file(layer)
    if not is_present(path):
      began = time.monotonic()
      learned, tested = self._split()
      weights = self._learner.fit(examples.pairs_of(learned, index), layer)
      held_out = examples.pairs_of(tested, index)
      predicted = self._learner.predict(weights, held_out.inputs)
      arrays = {n: np.ascontiguousarray(w) for n, w in weights.items()}
      numbers = {
        "r2": mean_r2(predicted, held_out.targets),
        "low": float(predicted.min()),
        "high": float(predicted.max()),
      }
      content = safetensors.numpy.save(arrays, {"numbers": json.dumps(numbers)})
      outputs.write_bytes(path, content)
      self._processes.note()
      seconds = time.monotonic() - began
      logging.info("Fitted and wrote %s in %.1f s", path, seconds)
    print(f"layer {layer}: R2 {self._read(layer).r2:.3f}", flush=True)

  def _read(self, layer: int) -> Fitted:
    """Reads the file of a layer."""
    with examples.opened(self._layer_file(layer)) as file:
      found = files.parse_json(file.metadata()["numbers"])
      weights = {name: file.get_tensor(name) for name in [*file.keys()]}
      return Fitted(weights, **found)

  def _save(self, fitted: Mapping[int, Fitted]) -> None:
    """Joins the layers; those that are not scored have zeros."""
    some = next(iter(fitted.values())).weights
    blank = {name: np.zeros_like(weights) for name, weights in some.items()}
    layers = [
      fitted[layer].weights if layer in fitted else blank
      for layer in range(self._lm.model.geometry.num_layers)
    ]
    low = min(each.low for each in fitted.values())
    high = max(each.high for each in fitted.values())
    self._learner.gate(layers, (low, high)).save(self._output)
