"""A training goes on under other meshes than that of its checkpoint."""

import contextlib
import json

import jax
import numpy as np
import pytest

from kvjax import models
from kvjax.cache.sharding import parse_mesh
from kvjax.experiments.finetuning import training, tuner
from kvjax.experiments.finetuning.tuner import Recipe, Tuner
from kvjax.prompts import Prompts

RNG = np.random.default_rng(0)
ROWS = [RNG.integers(5, 99, length).tolist() for length in (9, 7, 5, 8, 6, 9)]
PARTS = Prompts.of(ROWS, training.QUERIES)
# Two steps make an epoch.
RECIPE = Recipe(2, ("q", "v"), 3, 1e-2, 4, 0)


class Trained:
  """What a run has computed, in parts under several meshes."""

  def __init__(self, directory, output, monkeypatch):
    output.mkdir()
    self._directory = directory
    self._output = output
    self._monkeypatch = monkeypatch
    self.losses = []

  def go_on(self, mesh, stop=None):
    """Trains until a step, or to the end; returns the adapters."""
    mesh = mesh and parse_mesh(mesh)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
      lm = models.load(self._directory, "float32", mesh)
      run = Tuner(self._output, lm, PARTS, RECIPE, {})
      assert run.state.total == len(self.losses)
      take_step = training.train_step

      def take(*given):
        if run.state.total == stop:
          raise KeyboardInterrupt
        adapter, moments, loss = take_step(*given)
        self.losses.append(float(loss))
        return adapter, moments, loss

      with (
        self._monkeypatch.context() as patched,
        contextlib.suppress(KeyboardInterrupt),
      ):
        patched.setattr(training, "train_step", take)
        patched.setattr(tuner, "_SAVE_EVERY", 1)
        run.run()
      return run.state.params

  @property
  def nll(self):
    """What the log says of each epoch."""
    lines = (self._output / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["nll"] for line in lines]


def largest_share(params):
  """The largest part of an adapter that a device has."""
  return {
    leaf.addressable_shards[0].data.size / leaf.size
    for leaf in jax.tree.leaves(params)
  }


@pytest.mark.slow
def test_losses_and_adapters_are_those_of_a_run_without_interruption(
  tiny_directory, tmp_path, monkeypatch
):
  whole = Trained(tiny_directory, tmp_path / "whole", monkeypatch)
  wanted = whole.go_on(None)
  parts = Trained(tiny_directory, tmp_path / "parts", monkeypatch)
  on_rows = parts.go_on("data:4", stop=2)
  on_both = parts.go_on("data:2,model:2", stop=3)
  found = parts.go_on(None)
  assert largest_share(on_rows) == {1.0}
  # Second factors of adapters have the heads that "model" shares out.
  assert largest_share(on_both) == {0.5, 1.0}
  assert len(whole.losses) == 6
  np.testing.assert_allclose(parts.losses, whole.losses, rtol=1e-4)
  np.testing.assert_allclose(parts.nll, whole.nll, rtol=1e-4)
  assert len(parts.nll) == 4
  jax.tree.map(
    lambda one, other: np.testing.assert_allclose(one, other, atol=1e-4),
    found,
    wanted,
  )
  # A step moves them further than that.
  moved = [np.abs(np.asarray(x)).max() for x in jax.tree.leaves(wanted)]
  assert min(moved) > 1e-3
