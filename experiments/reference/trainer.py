"""Runs the stages of a training: steps, gates, checkpoints and a log."""

import dataclasses
import functools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvjax.errors import InputError
from kvjax.experiments.reference import batches, pieces, training, vocabulary
from kvjax.experiments.reference.checkpoints import Checkpoints, Progress
from kvjax.experiments.reference.curriculum import Stage
from kvjax.experiments.reference.growth import deepened
from kvjax.experiments.step_bar import step_bar
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import from_decoder

_SAVE_EVERY = 200
_REPORT_EVERY = 200
# Reading the loss waits for the step; the others are dispatched ahead.
_SHOW_EVERY = 10
_VALIDATION_ROWS = 48
_REPORT_ROWS = 12
_WARM_UP = 100
# A stage that misses its gate is extended by half, this often at most.
_MOST_EXTENSIONS = 2


class Trainer:
  """A training that goes on where its folder says it stopped.

  Attributes:
    state: how far it is.
  """

  def __init__(self, output: Path, seed: int, stages: tuple[Stage, ...]):
    """Starts from the last checkpoint in `output`, or from scratch.

    Raises:
      InputError: the folder holds a run with another seed or other stages.
    """
    self._seed = seed
    self._stages = stages
    self._log_path = output / "log.jsonl"
    self._pieces = pieces.Pieces(vocabulary.build())
    self._checkpoints = Checkpoints(output / "checkpoints")
    self._model, params = from_decoder(training.initial_decoder(seed))
    self.state = Progress.fresh(params, training.optimizer().init(params))
    stage = self._checkpoints.stage()
    run = output / "run.json"
    _check_claim(run, seed, stages, stage)
    for begun in stages[: stage + 1]:
      self._deepen(begun)
    self.state = self._checkpoints.latest(self.state)
    _check_claim(run, seed, stages, stage + (self.state.step > 0))
    run.write_text(json.dumps(_claim(seed, stages), indent=2) + "\n")

  def run(self) -> None:
    """Trains what is left of the stages."""
    while self.state.stage < len(self._stages):
      stage = self._stages[self.state.stage]
      self._train(stage)
      first, whole = self._measure(stage, _VALIDATION_ROWS)
      self._log(stage, None, first, whole)
      done = self.state.extensions == _MOST_EXTENSIONS
      if done or stage.passed(first, whole):
        self.state = self.state.next_stage()
        for following in self._stages[self.state.stage :][:1]:
          self._deepen(following)
      else:
        self.state = self.state.extended()
      self._checkpoints.save(self.state)

  def decoder(self) -> Decoder:
    """The decoder with the weights of now."""
    return nnx.merge(self._model.graphdef, self.state.params)

  def _deepen(self, stage: Stage) -> None:
    """Gives the decoder the depth that a stage begins with."""
    if stage.layers is None:
      return
    grown = deepened(self.decoder(), stage.layers, self._seed)
    self._model, params = from_decoder(grown)
    self.state = self.state.restarted(params, training.optimizer().init(params))

  def _train(self, stage: Stage) -> None:
    """Takes the steps that are left of a stage and of its extensions."""
    steps = stage.steps + self.state.extensions * (stage.steps // 2)
    left = range(self.state.step, steps)
    draw = functools.partial(self._arrays, stage, self.state.stage)
    with step_bar(stage.name, left) as show:
      began = time.monotonic()
      for batch in batches.ahead(draw, left):
        loss = self._step(stage, batch)
        if self.state.step % _SHOW_EVERY == 0:
          show(self.state.step, float(loss))
        self.state = self.state.spent(time.monotonic() - began)
        if self.state.step % _REPORT_EVERY == 0:
          found = self._measure(stage, _REPORT_ROWS)
          self._log(stage, float(loss), *found)
        if self.state.step % _SAVE_EVERY == 0:
          self._checkpoints.save(self.state)
        began = time.monotonic()

  def _step(
    self, stage: Stage, batch: Mapping[str, np.ndarray]
  ) -> Float[Array, ""]:
    """Takes one step and answers its loss, which may still be computed."""
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

  def _arrays(
    self, stage: Stage, index: int, step: int
  ) -> dict[str, np.ndarray]:
    """The batch of a step of stage number `index`."""
    return training.arrays(
      batches.training_batch(stage, index, step, self._seed, self._pieces)
    )

  def _measure(
    self, stage: Stage, rows: int
  ) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of first symbols and of whole answers right, per lesson."""
    first, whole = {}, {}
    for lesson in stage.mixture:
      batch = batches.validation_batch(
        lesson, stage, rows, self._seed, self._pieces
      )
      right = training.right(
        self._model, self.state.params, training.arrays(batch)
      )
      first[lesson], whole[lesson] = batches.accuracy(batch, np.asarray(right))
    return first, whole

  def _log(
    self,
    stage: Stage,
    loss: float | None,
    first: Mapping[str, float],
    whole: Mapping[str, float],
  ) -> None:
    """Appends a line about where the training stands."""
    record = {
      "stage": stage.name,
      "step": self.state.step,
      "tokens": self.state.tokens,
      "seconds": round(self.state.seconds),
      "loss": loss,
      "first": first,
      "whole": whole,
    }
    with self._log_path.open("a") as log:
      log.write(json.dumps(record) + "\n")


def _claim(seed: int, stages: Sequence[Stage]) -> dict[str, Any]:
  """What a folder says of the run that it holds."""
  described = [dataclasses.asdict(stage) for stage in stages]
  claim: dict[str, Any] = json.loads(
    json.dumps({"seed": seed, "stages": described})
  )
  return claim


def _check_claim(
  path: Path, seed: int, stages: Sequence[Stage], begun: int
) -> None:
  """Refuses a folder that holds another run.

  Stages that have not begun may change, but not the depth of the first of
  them, which the decoder already has.

  Args:
    path: of what the folder says.
    seed: of this run.
    stages: of this run.
    begun: how many stages have begun.

  Raises:
    InputError: the run there has another seed or other stages.
  """
  if not path.exists():
    return
  earlier, run = json.loads(path.read_text()), _claim(seed, stages)
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
