"""Runs the fine-tuning epochs: steps, checkpoints and a log."""

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from kvjax import files, hosts
from kvjax.errors import InputError
from kvjax.experiments import exits
from kvjax.experiments.finetuning import documents, training
from kvjax.experiments.reference.progress import Checkpoints, Progress
from kvjax.experiments.run import multihost, preemption, sending, typed_records
from kvjax.experiments.run.claiming import claim
from kvjax.experiments.run.progress_bar import step_bar
from kvjax.files import is_present, read_text
from kvjax.models import lora
from kvjax.models.language_model import DecoderModel
from kvjax.models.pretrained import Pretrained
from kvjax.prompts import Prompts

_RUN = "run.json"
# With a dot, so that old ones are removed from addresses, too; see `sending`.
_CHECKPOINTS = ".checkpoints"
# What the first host says of the line of an epoch's end.
_LOGGED = b"logged"
_SAVE_EVERY = 100
# Steps between reads of the loss; reading waits for the asynchronous step.
_SHOW_EVERY = 5


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The hyperparameters of fine-tuning.

  Attributes:
    rank: rank of the adapters.
    targets: projections with adapters, of `kvjax.models.lora.TARGETS`.
    epochs: number of epochs.
    learning_rate: maximum learning rate, see `training.Schedule`.
    batch: chunks per step.
    seed: seed of the adapters and of the order of chunks.
  """

  rank: int
  targets: tuple[str, ...]
  epochs: int
  learning_rate: float
  batch: int
  seed: int


class Tuner:
  """A fine-tuning run that resumes from its folder.

  Attributes:
    state: its progress; its params are the adapters.
  """

  def __init__(
    self,
    output: Path,
    lm: Pretrained,
    parts: Prompts,
    recipe: Recipe,
    source: Mapping[str, Any],
  ):
    """Resumes from the last checkpoint in `output`, or starts fresh.

    Args:
      output: an existing folder for checkpoints and the log, which all hosts
        see.
      lm: the model; on a mesh, with the mesh in context.
      parts: chunks of the documents, see `documents.chunks`.
      recipe: the hyperparameters.
      source: identifies the model and the documents.

    Raises:
      InputError: the recipe's rank or targets are invalid, or the folder has
        another run or another model.
    """
    self._parts = parts
    self._recipe = recipe
    self._model, params = lora.add_adapters(
      lm.decoder, lm.params, recipe.rank, recipe.targets, recipe.seed
    )
    adapter, self._frozen = lora.split(params)
    self._epoch_steps = documents.steps_per_epoch(parts, recipe.batch)
    steps = recipe.epochs * self._epoch_steps
    self._schedule = training.Schedule(recipe.learning_rate, steps)
    settings = dict(source) | dataclasses.asdict(recipe)
    multihost.on_first(lambda: claim(output / _RUN, settings))
    if not is_present(output / _RUN):
      raise InputError(
        f"{output} is not the same folder on all hosts, which write parts of "
        "checkpoints there; choose an --output that all of them see."
      )
    # Where one host refuses, the others must not go on.
    multihost.gather(b"")
    moments = training.optimizer(self._schedule).init(adapter)
    if hosts.spanned():
      moments = jax.tree.map(_on_all_hosts, moments)
    self._checkpoints = Checkpoints(output / _CHECKPOINTS)
    self.state = self._checkpoints.latest(Progress(adapter, moments))
    self._log_path = output / "log.jsonl"

  def run(self) -> None:
    """Takes the remaining steps, with a log line per epoch.

    Raises:
      exits.StoppedError: a host got SIGTERM; the steps are saved.
    """
    logged = multihost.from_first(self._drop_log_lines) == _LOGGED
    left = range(self.state.total, self._schedule.steps)
    with (
      step_bar("finetuning", left) as show,
      preemption.Preemption() as preempted,
    ):
      if left.start % self._epoch_steps == 0 and not logged:
        self._log(preempted)
      logging.info("Starting after step %d of %d", left.start, left.stop)
      began = time.monotonic()
      for _ in left:
        loss = self._step()
        done = self.state.total
        if done == left.start + 1:
          loss.block_until_ready()
          logging.info(
            "The first step, of %d chunks, took %.1f s with its compilation",
            *(self._recipe.batch, time.monotonic() - began),
          )
        if done % _SHOW_EVERY == 0:
          show(done, float(loss))
        stops = preempted.reached()
        epoch_ends = done % self._epoch_steps == 0
        if epoch_ends or done % _SAVE_EVERY == 0 or stops:
          loss.block_until_ready()
          self.state = self.state.spent(time.monotonic() - began)
          self._save()
          if stops:
            raise self._stopped()
          preempted.saved()
          if epoch_ends:
            self._log(preempted)
          began = time.monotonic()

  def _save(self) -> None:
    self._checkpoints.save(self.state)
    sending.send_if_due()
    logging.info("Saved a checkpoint after step %d", self.state.total)

  def _stopped(self) -> exits.StoppedError:
    """Says that the run has been ended, on the first host."""
    return exits.StoppedError(
      f"Stopped; step {self.state.total} of {self._schedule.steps} is saved, "
      "and the same command goes on from there."
      if multihost.is_first()
      else ""
    )

  def merged(self) -> tuple[DecoderModel, nnx.State]:
    """Merges the adapters into the model's weights."""
    return lora.merge_adapters(self._model, self._params())

  def _params(self) -> nnx.State:
    return nnx.merge_state(self.state.params, self._frozen)

  def _step(self) -> Float[Array, ""]:
    """Takes one step and returns its loss, which may still be pending."""
    tokens, lengths = self._batch(self.state.total)
    adapter, moments, loss = training.train_step(
      self._model,
      self._schedule,
      self.state.params,
      self.state.moments,
      self._frozen,
      tokens,
      lengths,
    )
    foretold = int(np.maximum(lengths - 1, 0).sum())
    self.state = self.state.advanced(adapter, moments, foretold)
    return loss

  def _batch(self, step: int) -> documents.Batch:
    recipe = self._recipe
    return documents.batch(self._parts, recipe.batch, step, recipe.seed)

  def _nll(self, preempted: preemption.Preemption) -> float:
    """Computes the documents' NLL per token with the current adapters."""
    params = self._params()
    sums = []
    for step in range(self._epoch_steps):
      sums.append(training.measure(self._model, params, *self._batch(step)))
      if preempted.noticed():
        raise self._stopped()
    foretold = np.asarray(self._parts.lengths) - 1
    # One by one, as NumPy takes an interrupt of the wait for another error.
    return sum(map(float, sums)) / float(foretold.sum())

  def _log(self, preempted: preemption.Preemption) -> None:
    """Measures, appends a line of progress to the log, and prints it."""
    epoch = self.state.total // self._epoch_steps
    nll = self._nll(preempted)
    record = {
      "epoch": epoch,
      "steps": self.state.total,
      "tokens": self.state.tokens,
      "seconds": round(self.state.seconds, 1),
      "nll": nll,
    }
    line = f"{json.dumps(record)}\n".encode()
    multihost.on_first(lambda: files.append(self._log_path, line))
    if multihost.is_first():
      print(
        f"epoch {epoch} of {self._recipe.epochs}: {nll:.3f} nats per token, "
        f"{self.state.seconds:.0f} s",
        flush=True,
      )

  def _drop_log_lines(self) -> bytes:
    """Drops log lines that a killed run wrote after its last checkpoint.

    Returns:
      `_LOGGED` if the last line is of this checkpoint.

    Raises:
      InputError: the log has lines that no run has written.
    """
    if not is_present(self._log_path):
      return b""
    lines = read_text(self._log_path).splitlines(keepends=True)
    # Without a checkpoint, the first line is also written again.
    last = self.state.total or -1
    kept = [
      line
      for number, line in enumerate(lines, start=1)
      if line.endswith("\n") and self._steps(line, number) <= last
    ]
    files.write_text(self._log_path, "".join(kept))
    return _LOGGED if kept and self._steps(kept[-1], len(kept)) == last else b""

  def _steps(self, line: str, number: int) -> int:
    try:
      fields = files.parse_json(line)
      typed_records.check(fields, {"steps": int})
    except ValueError as error:
      raise InputError(
        f"Line {number} of {self._log_path} is not what a run writes; remove "
        "the file."
      ) from error
    return fields["steps"]


def _on_all_hosts(leaf: Array) -> Array:
  """Puts a counter to the devices of all hosts; other arrays are there."""
  if leaf.ndim:
    return leaf
  mesh = jax.sharding.get_mesh()
  return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))
