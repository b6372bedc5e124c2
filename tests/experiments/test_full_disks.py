"""A full disk leaves what can be resumed, or nothing."""

import resource

import jax
import numpy as np
import pytest
from odd_files import refused

import kvjax
from kvjax import files
from kvjax.experiments.reference.progress import Checkpoints, Progress
from kvjax.experiments.run.claiming import claim
from kvjax.testing import TinyModel


def limited(size):
  """A file that may not grow stands for a disk that is full."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
  return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_a_claim_that_can_be_resumed(tmp_path):
  path = tmp_path / "run.json"
  free = limited(5)
  try:
    refused(lambda: claim(path, {"a": 1}), "run.json cannot be written")
  finally:
    free()
  assert not list(tmp_path.iterdir())
  claim(path, {"a": 1})
  free = limited(5)
  try:
    refused(lambda: claim(path, {"a": 1}), "run.json cannot be written")
  finally:
    free()
  claim(path, {"a": 1})


# What orbax raises if a disk is full; its own threads make noise of it.
FULL = [
  OSError(28, "No space left on device"),
  ValueError(
    'RESOURCE_EXHAUSTED: Error opening "zarr3" driver: Failed writing: "/a/b": '
    "Failed to write 95 bytes to file 19: No space left on device "
    "[source locations='a.cc:1']"
  ),
]


def fail(error):
  def save(*args, **kwargs):
    raise error

  return save


@pytest.mark.parametrize("error", FULL, ids=["OSError", "ValueError"])
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch, error):
  state = Progress({"a": np.zeros(9)}, {"a": np.zeros(9)})
  one = state.advanced(state.params, state.moments, 3)
  two = one.advanced({"a": np.ones(9)}, state.moments, 3)
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(one)
  with monkeypatch.context() as patched:
    patched.setattr(checkpoints._checkpointer, "save", fail(error))
    refused(
      lambda: checkpoints.save(two),
      f"{tmp_path}: No space left on device; the one before is kept, and the",
    )
  assert checkpoints.latest(state).total == 1
  checkpoints.save(two)
  latest = Checkpoints(tmp_path).latest(state)
  assert latest.total == 2
  assert jax.tree.leaves(latest.params)[0].all()
  with monkeypatch.context() as patched:
    patched.setattr(checkpoints._checkpointer, "load", fail(error))
    refused(
      lambda: checkpoints.latest(state),
      f"No checkpoint in {tmp_path} can be read .512, 256.; remove them",
    )


@pytest.mark.parametrize("error", FULL, ids=["OSError", "ValueError"])
def test_a_full_disk_leaves_no_cache(tmp_path, monkeypatch, error):
  model = TinyModel()
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
  prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  monkeypatch.setattr(files.orbax(), "save", fail(error))
  refused(
    lambda: kvjax.save_cache(cache, tmp_path, model=model, model_id="a"),
    f"cannot be written to {tmp_path}: No space left on device",
  )
  assert not list(tmp_path.iterdir())
