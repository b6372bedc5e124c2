"""The progress of a training run, and its checkpoints."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments.run import multihost, sending
from kvjax.models.orbax_files import without_log


@dataclasses.dataclass(frozen=True)
class Progress:
  """Weights, optimizer state and counters.

  Attributes:
    params: the weights.
    moments: the optimizer state.
    stage: number of the current stage.
    step: completed steps of it.
    extensions: number of its extensions.
    total: completed steps in total.
    tokens: tokens trained on in total.
    seconds: wall time spent in training steps.
  """

  params: PyTree
  moments: PyTree
  stage: int = 0
  step: int = 0
  extensions: int = 0
  total: int = 0
  tokens: int = 0
  seconds: float = 0.0

  def advanced(
    self, params: PyTree, moments: PyTree, tokens: int
  ) -> "Progress":
    """Returns the progress after one more step."""
    return dataclasses.replace(
      self,
      params=params,
      moments=moments,
      step=self.step + 1,
      total=self.total + 1,
      tokens=self.tokens + tokens,
    )

  def spent(self, seconds: float) -> "Progress":
    """Returns the same progress with more seconds."""
    return dataclasses.replace(self, seconds=self.seconds + seconds)

  def next_stage(self) -> "Progress":
    """Returns the progress at the start of the next stage."""
    return dataclasses.replace(self, stage=self.stage + 1, step=0, extensions=0)


_COUNTERS = ("stage", "step", "extensions", "total", "tokens", "seconds")


class Checkpoints:
  """Saves and restores the progress of a run; keeps the last two."""

  def __init__(self, directory: Path):
    """Uses `directory`, which is created on demand."""
    self._directory = directory
    self._checkpointer = ocp.training.Checkpointer(
      directory,
      preservation_policy=ocp.training.preservation_policies.LatestN(2),
    )

  def save(self, state: Progress) -> None:
    """Writes a checkpoint, replacing one of the same progress.

    Raises:
      InputError: it cannot be written; the one before is kept.
    """
    try:
      with without_log():
        self._checkpointer.save(
          _number(state), _as_tree(state), force=True, overwrite=True
        )
    except (OSError, ValueError) as error:
      raise InputError(
        f"The checkpoint cannot be written to {self._directory}: "
        f"{files.reason(error)}; the one before is kept, and the same command "
        "goes on from there."
      ) from error

  def stage(self) -> int:
    """The stage of the latest checkpoint; the first one without checkpoints."""
    newest = self._checkpointer.latest
    return 0 if newest is None else _stage(newest.step)

  def latest(self, fresh: Progress) -> Progress:
    """Restores the latest checkpoint, or returns `fresh` without one.

    A damaged one is passed over, with a warning in the log, for the one before
    in the same stage. All hosts must call it, and see the same files.

    Raises:
      InputError: none can be read.
    """
    steps = multihost.from_first(self._steps).decode().split()
    if not steps:
      return fresh
    for step in steps:
      tree = self._read(int(step), fresh)
      if tree:
        return _from_tree(tree, fresh)
      logging.warning(
        "The checkpoint %s is damaged, and passed over.",
        sending.named(str(self._directory / step)),
      )
    raise InputError(
      f"No checkpoint in {self._directory} can be read ({', '.join(steps)}); "
      "remove them, so that the same command goes on from the one before, or "
      "else begins again."
    )

  def _steps(self) -> bytes:
    """Numbers of the checkpoints of the latest stage, the newest first."""
    stage = self.stage()
    numbers = (found.step for found in reversed(self._checkpointer.checkpoints))
    return " ".join(str(n) for n in numbers if _stage(n) == stage).encode()

  def _read(self, step: int, fresh: Progress) -> dict[str, Any]:
    """Reads a checkpoint on all hosts; nothing if it is damaged for one."""
    # Where many reads fail at a time, orbax leaves tasks behind, of which
    # Python prints the errors: a part comes first.
    part: dict[str, Any] = {"counters": {"total": np.asarray(0)}}
    tree: dict[str, Any] = {}
    for wanted, partial in ((part, True), (_as_tree(fresh), False)):
      tree = self._read_alone(step, wanted, partial)
      # Hosts go on from the same one, and number what they read alike.
      if not all(multihost.gather(b"read" if tree else b"")):
        return {}
    return tree

  def _read_alone(
    self, step: int, wanted: dict[str, Any], partial: bool
  ) -> dict[str, Any]:
    """Reads what this host has of a checkpoint; nothing if it is damaged."""
    own = ocp.Context()
    own.pytree.loading.partial_load = partial
    # Hosts that can read would wait for one that cannot.
    own.multiprocessing.primary_host = jax.process_index()
    own.multiprocessing.active_processes = {jax.process_index()}
    try:
      with without_log(), own:
        tree: dict[str, Any] = self._checkpointer.load(step, wanted)
    except (KeyError, OSError, ValueError):
      return {}
    return tree


def _number(state: Progress) -> int:
  """Returns a number that grows with every step, stage and extension."""
  return state.total * 256 + state.stage * 8 + state.extensions


def _stage(number: int) -> int:
  return number % 256 // 8


def _as_tree(state: Progress) -> dict[str, Any]:
  """Converts leaves to a list, which any version of nnx can restore."""
  return {
    "params": jax.tree.leaves(state.params),
    "moments": jax.tree.leaves(state.moments),
    "counters": {name: np.asarray(getattr(state, name)) for name in _COUNTERS},
  }


def _from_tree(tree: Mapping[str, Any], fresh: Progress) -> Progress:
  """Returns the progress of such a tree; `fresh` has the structure."""
  structure = jax.tree.structure
  return Progress(
    params=jax.tree.unflatten(
      structure(fresh.params), jax.tree.leaves(tree["params"])
    ),
    moments=jax.tree.unflatten(
      structure(fresh.moments), jax.tree.leaves(tree["moments"])
    ),
    **{
      name: type(getattr(fresh, name))(tree["counters"][name])
      for name in _COUNTERS
    },
  )
