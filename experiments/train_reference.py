"""Trains the bundled reference model: `python -m experiments.train_reference`.

Resumes from its last checkpoint, bit for bit, when started again with the same
flags.
"""

import concurrent.futures
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from rich import progress

from experiments import cli
from experiments.reference import (
  batches,
  curriculum,
  export,
  pieces,
  training,
  vocabulary,
)
from experiments.reference.checkpoints import Checkpoints, Progress
from kvjax.errors import InputError
from models.decoder import Decoder

_OUTPUT = flags.DEFINE_string(
  "output",
  None,
  "Folder for checkpoints, the log and the exported model.",
  required=True,
)
_SEED = flags.DEFINE_integer(
  "seed", 0, "Seed of weights and data.", lower_bound=0
)
_STAGES = flags.DEFINE_list(
  "stages", None, "Names of the stages to train, in order; all by default."
)

_SAVE_EVERY = 200
_REPORT_EVERY = 200
_VALIDATION_ROWS = 48
_REPORT_ROWS = 12
_WARM_UP = 100
# A stage that misses its gate is extended by half, this often at most.
_MOST_EXTENSIONS = 2


class Trainer:
  """Runs the stages, with checkpoints, validation and a log."""

  def __init__(
    self, output: Path, seed: int, stages: tuple[curriculum.Stage, ...]
  ):
    """Starts from the last checkpoint in `output`, or from scratch."""
    self._seed = seed
    self._stages = stages
    self._output = output
    self._pieces = pieces.Pieces(vocabulary.build())
    decoder = training.initial_decoder(seed)
    self._graphdef, params = nnx.split(decoder)
    self._checkpoints = Checkpoints(output / "checkpoints")
    fresh = Progress.fresh(params, training.optimizer().init(params))
    self.state = self._checkpoints.latest(fresh)
    begun = self.state.stage + (self.state.step > 0)
    _claim(output / "run.json", seed, stages, begun)

  def run(self) -> None:
    """Trains what is left of the stages."""
    while self.state.stage < len(self._stages):
      stage = self._stages[self.state.stage]
      steps = stage.steps + self.state.extensions * (stage.steps // 2)
      self._steps(stage, steps)
      passed = self._validate(stage, _VALIDATION_ROWS)
      if passed or self.state.extensions == _MOST_EXTENSIONS:
        self.state = self.state.next_stage()
      else:
        self.state = self.state.extended()
      self._checkpoints.save(self.state)

  def decoder(self) -> Decoder:
    """The decoder with the weights of now."""
    return nnx.merge(self._graphdef, self.state.params)

  def _steps(self, stage: curriculum.Stage, steps: int) -> None:
    index = self.state.stage
    began = time.monotonic()
    with (
      concurrent.futures.ThreadPoolExecutor(1) as ahead,
      progress.Progress(
        progress.TextColumn(stage.name),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("loss {task.fields[loss]:.3f}"),
        disable=not sys.stdout.isatty(),
      ) as bar,
    ):
      task = bar.add_task(
        stage.name, total=steps, completed=self.state.step, loss=np.nan
      )

      def make(step: int) -> dict[str, np.ndarray]:
        return training.arrays(
          batches.training_batch(stage, index, step, self._seed, self._pieces)
        )

      made = ahead.submit(make, self.state.step)
      while self.state.step < steps:
        batch = made.result()
        made = ahead.submit(make, self.state.step + 1)
        params, moments, loss = training.train_step(
          self._graphdef,
          self.state.params,
          self.state.moments,
          batch,
          jnp.float32(self._rate(stage)),
          stage.micro,
        )
        loss = float(loss)
        now = time.monotonic()
        self.state = self.state.advanced(
          params, moments, stage.length * stage.batch, now - began
        )
        began = now
        bar.update(task, completed=self.state.step, loss=loss)
        if self.state.step % _REPORT_EVERY == 0:
          self._validate(stage, _REPORT_ROWS, loss)
        if self.state.step % _SAVE_EVERY == 0:
          self._checkpoints.save(self.state)
        began = time.monotonic()

  def _validate(
    self, stage: curriculum.Stage, rows: int, loss: float | None = None
  ) -> bool:
    """Logs the accuracy per lesson; answers whether the gate is passed."""
    first, whole = {}, {}
    for lesson in stage.mixture:
      batch = batches.validation_batch(
        lesson, stage, rows, self._seed, self._pieces
      )
      right = np.asarray(
        training.right(
          self._graphdef, self.state.params, training.arrays(batch)
        )
      )
      first[lesson], whole[lesson] = batches.accuracy(batch, right)
    record = {
      "stage": stage.name,
      "step": self.state.step,
      "tokens": self.state.tokens,
      "seconds": round(self.state.seconds),
      "loss": loss,
      "first": first,
      "whole": whole,
    }
    with (self._output / "log.jsonl").open("a") as log:
      log.write(json.dumps(record) + "\n")
    return all(
      measured[name] >= least
      for measured, gate in ((first, stage.gate), (whole, stage.whole_gate))
      for name, least in gate.items()
    )

  def _rate(self, stage: curriculum.Stage) -> float:
    """The stage's learning rate; the first stage warms up."""
    rate = stage.rate(self.state.step)
    if self.state.stage == 0:
      rate *= min(1.0, (self.state.step + 1) / _WARM_UP)
    return rate


def _claim(
  path: Path, seed: int, stages: Sequence[curriculum.Stage], begun: int
) -> None:
  """Writes down whose run the folder holds, or refuses another's.

  Stages that have not begun may change.

  Raises:
    InputError: the folder holds a run with another seed or other stages.
  """
  described = [dataclasses.asdict(stage) for stage in stages]
  run = json.loads(json.dumps({"seed": seed, "stages": described}))
  if path.exists():
    earlier = json.loads(path.read_text())
    if earlier["seed"] != seed:
      raise InputError(
        f"{path.parent} holds a run with seed {earlier['seed']}, not {seed}: "
        "choose another --output or that seed."
      )
    if earlier["stages"][:begun] != run["stages"][:begun]:
      names = ", ".join(stage["name"] for stage in earlier["stages"][:begun])
      raise InputError(
        f"{path.parent} holds a run whose stages so far ({names}) are not "
        "those of this command: choose another --output."
      )
  path.write_text(json.dumps(run, indent=2) + "\n")


def _chosen_stages(names: list[str] | None) -> tuple[curriculum.Stage, ...]:
  if names is None:
    return curriculum.STAGES
  known = {stage.name: stage for stage in curriculum.STAGES}
  for name in names:
    if name not in known:
      raise InputError(
        f"There is no training stage {name!r}; stages are {', '.join(known)}."
      )
  return tuple(known[name] for name in names)


def main() -> None:
  """Trains, then validates and exports."""
  stages = _chosen_stages(_STAGES.value)
  output = Path(_OUTPUT.value).absolute()
  try:
    output.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise InputError(
      f"The output folder {output} cannot be made: {error.strerror}."
    ) from error
  trainer = Trainer(output, _SEED.value, stages)
  trainer.run()
  export.save(
    trainer.decoder(), trainer.state, _SEED.value, stages, output / "model"
  )


if __name__ == "__main__":
  cli.run(main)
