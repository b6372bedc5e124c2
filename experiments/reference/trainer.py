"""Runs the training stages: steps, gates, checkpoints and a log."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments.reference import batches, pieces, training, vocabulary
from kvjax.experiments.reference.curriculum import Stage
from kvjax.experiments.reference.growth import deepened
from kvjax.experiments.reference.progress import Checkpoints, Progress
from kvjax.experiments.reference.rows import Batch
from kvjax.experiments.run import typed_records
from kvjax.experiments.run.progress_bar import step_bar
from kvjax.files import is_present, read_json, write_json
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import from_decoder

_SAVE_EVERY = 200
_REPORT_EVERY = 200
# Steps between reads of the loss; reading waits for the asynchronous step.
_SHOW_EVERY = 10
_VALIDATION_ROWS = 48
_REPORT_ROWS = 12
_WARM_UP = 100
# Maximum number of extensions, by half each, of a stage that misses its gate.
_MOST_EXTENSIONS = 2


class Trainer:
  """A training run that resumes from its folder.

  Attributes:
    state: its progress.
  """

  def __init__(self, output: Path, seed: int, stages: tuple[Stage, ...]):
    """Resumes from the last checkpoint in `output`, or starts fresh.

    Raises:
      InputError: the folder has a run with another seed or other stages.
    """
    self._seed = seed
    self._stages = stages
    self._log_path = output / "log.jsonl"
    self._pieces = pieces.Pieces(vocabulary.build())
    self._checkpoints = Checkpoints(output / "checkpoints")
    self._model, params = from_decoder(training.initial_decoder(seed))
    self.state = Progress(params, training.optimizer().init(params))
    stage = self._checkpoints.stage()
    run = output / "run.json"
    _check_claim(run, seed, stages, stage)
    for begun in stages[: stage + 1]:
      self._deepen(begun)
    self.state = self._checkpoints.latest(self.state)
    _check_claim(run, seed, stages, stage + (self.state.step > 0))
    write_json(run, _claim(seed, stages))

  def run(self) -> None:
    """Trains the remaining stages."""
    while self.state.stage < len(self._stages):
      stage = self._stages[self.state.stage]
      self._train(stage)
      first, complete = self._measure(stage, _VALIDATION_ROWS)
      self._log(stage, None, first, complete)
      done = self.state.extensions == _MOST_EXTENSIONS
      if done or stage.passed(first):
        self.state = self.state.next_stage()
        for following in self._stages[self.state.stage :][:1]:
          self._deepen(following)
      else:
        extensions = self.state.extensions + 1
        self.state = dataclasses.replace(self.state, extensions=extensions)
      self._checkpoints.save(self.state)

  def decoder(self) -> Decoder:
    """Returns the decoder with the current weights."""
    return nnx.merge(self._model.graphdef, self.state.params)

  def _deepen(self, stage: Stage) -> None:
    """Deepens the decoder to the layers of a stage."""
    if stage.layers is None:
      return
    grown = deepened(self.decoder(), stage.layers, self._seed)
    self._model, params = from_decoder(grown)
    moments = training.optimizer().init(params)
    self.state = dataclasses.replace(self.state, params=params, moments=moments)

  def _train(self, stage: Stage) -> None:
    """Takes the remaining steps of a stage and its extensions."""
    steps = stage.steps + self.state.extensions * (stage.steps // 2)
    left = range(self.state.step, steps)
    number = self.state.stage

    def draw(step: int) -> Batch:
      return batches.training_batch(
        stage, number, step, self._seed, self._pieces
      )

    with step_bar(stage.name, left) as show:
      began = time.monotonic()
      for batch in batches.ahead(draw, left):
        loss = self._step(stage, batch)
        if self.state.step % _SHOW_EVERY == 0:
          show(self.state.step, float(loss))
        self.state = self.state.spent(time.monotonic() - began)
        if self.state.step % _REPORT_EVERY == 0:
          accuracies = self._measure(stage, _REPORT_ROWS)
          self._log(stage, float(loss), *accuracies)
        if self.state.step % _SAVE_EVERY == 0:
          self._checkpoints.save(self.state)
        began = time.monotonic()

  def _step(self, stage: Stage, batch: Batch) -> Float[Array, ""]:
    """Takes one step and returns its loss, which may still be pending."""
    rate = stage.rate(self.state.step)
    if self.state.stage == 0 or stage.layers is not None:
      rate *= min(1.0, (self.state.step + 1) / _WARM_UP)
    params, moments, loss = training.train_step(
      self._model,
      self.state.params,
      self.state.moments,
      batch,
      jnp.float32(rate),
      stage.micro,
    )
    self.state = self.state.advanced(
      params, moments, stage.length * stage.batch
    )
    return loss

  def _measure(
    self, stage: Stage, rows: int
  ) -> tuple[dict[str, float], dict[str, float]]:
    """Measures correct first symbols and complete answers, per lesson."""
    first, complete = {}, {}
    for lesson in stage.mixture:
      batch = batches.validation_batch(
        lesson, stage, rows, self._seed, self._pieces
      )
      right = training.right(self._model, self.state.params, batch)
      first[lesson], complete[lesson] = batches.accuracy(
        batch, np.asarray(right)
      )
    return first, complete

  def _log(
    self,
    stage: Stage,
    loss: float | None,
    first: Mapping[str, float],
    complete: Mapping[str, float],
  ) -> None:
    """Appends a line of progress to the log."""
    record = {
      "stage": stage.name,
      "step": self.state.step,
      "tokens": self.state.tokens,
      "seconds": round(self.state.seconds),
      "loss": loss,
      "first": first,
      "whole": complete,
    }
    files.append(self._log_path, f"{json.dumps(record)}\n".encode())


def _claim(seed: int, stages: Sequence[Stage]) -> dict[str, Any]:
  """Builds the record that identifies the run of a folder."""
  described = [dataclasses.asdict(stage) for stage in stages]
  return json.loads(json.dumps({"seed": seed, "stages": described}))


def _read_claim(path: Path) -> dict[str, Any]:
  """Reads the record of a folder's run.

  Raises:
    InputError: it is not what `_claim` builds.
  """
  earlier = read_json(path)
  try:
    typed_records.check(earlier, {"seed": int, "stages": list[dict[str, Any]]})
    for stage in earlier["stages"]:
      typed_records.check(stage, {"name": str, "layers": int | None})
  except ValueError as error:
    raise InputError(
      f"{path} is not what a run writes ({error}); choose another --output."
    ) from error
  return earlier


def _check_claim(
  path: Path, seed: int, stages: Sequence[Stage], begun: int
) -> None:
  """Rejects a folder with another run.

  Stages that have not started may change, except for the depth of the first of
  them, which the decoder already has.

  Raises:
    InputError: the run in the folder has another seed or other stages, or its
      record cannot be read.
  """
  if not is_present(path):
    return
  earlier, run = _read_claim(path), _claim(seed, stages)
  if earlier["seed"] != seed:
    raise InputError(
      f"{path.parent} holds a run with seed {earlier['seed']}, not {seed}: "
      "choose another --output or that seed."
    )
  theirs, ours = earlier["stages"], run["stages"]
  following = zip(
    theirs[begun : begun + 1], ours[begun : begun + 1], strict=False
  )
  if theirs[:begun] != ours[:begun] or any(
    one["layers"] != other["layers"] for one, other in following
  ):
    names = ", ".join(stage["name"] for stage in theirs[: max(begun, 1)])
    raise InputError(
      f"{path.parent} holds a run whose stages so far ({names}) are not "
      "those of this command: choose another --output."
    )
