"""Checkpoints of trainings, of which parts are missing."""

import dataclasses
import gc
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.experiments.reference.progress import Checkpoints, Progress

# Orbax leaves tasks behind where it misses what another file refers to.
pytestmark = pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnraisableExceptionWarning"
)
# Files that orbax writes for every host, and then merges into those that it
# reads; values stay where they are. The others describe a checkpoint that says
# itself what it holds.
NOT_READ = {
  "_CHECKPOINT_METADATA",
  "_sharding",
  "commit_success.txt",
  "process_0",
}


def after(steps):
  """The progress after some steps."""
  params = {"a": jnp.arange(2000.0) + steps, "b": jnp.float32(steps)}
  moments = {"a": jnp.arange(3000.0) * steps}
  return Progress(params, moments, total=steps, step=steps, tokens=7 * steps)


FRESH = after(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """The last two of three checkpoints."""
  folder = tmp_path_factory.mktemp("run")
  checkpoints = Checkpoints(folder)
  for steps in (1, 2, 3):
    checkpoints.save(after(steps))
  assert sorted(path.name for path in folder.iterdir()) == ["512", "768"]
  return folder


def assert_same(found, expected):
  jax.tree.map(
    np.testing.assert_array_equal,
    *(
      (each.params, each.moments, each.total, each.tokens)
      for each in (found, expected)
    ),
  )


def test_any_file_may_be_missing_from_the_newest(saved, tmp_path, caplog):
  """As if it had been sent elsewhere in part."""
  kinds = {2: set(), 3: set()}
  for path in sorted(saved.glob("768/**/*")):
    if not path.is_file():
      continue
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    (folder / path.relative_to(saved)).unlink()
    caplog.clear()
    found = Checkpoints(folder).latest(FRESH)
    assert_same(found, after(found.total))
    kinds[found.total].add(path.name)
    lines = [record.getMessage() for record in caplog.records]
    said = [line for line in lines if "damaged" in line]
    damaged = f"The checkpoint {folder}/768 is damaged, and passed over."
    assert said == [damaged] * (found.total == 2)
    shutil.rmtree(folder)
  gc.collect()  # Here, as later tests must not hear of the tasks.
  assert kinds[2] >= {"_METADATA", "manifest.ocdbt"}
  assert kinds[3] >= NOT_READ
  assert not kinds[2] & NOT_READ


def test_a_step_may_be_saved_again_where_a_damaged_one_is(saved, tmp_path):
  folder = tmp_path / "copy"
  shutil.copytree(saved, folder)
  (folder / "768" / "state" / "manifest.ocdbt").unlink()
  checkpoints = Checkpoints(folder)
  assert checkpoints.latest(FRESH).total == 2
  checkpoints.save(after(3))
  assert_same(Checkpoints(folder).latest(FRESH), after(3))


def test_checkpoints_that_are_all_damaged_are_named(saved, tmp_path):
  folder = tmp_path / "copy"
  shutil.copytree(saved, folder)
  for path in folder.glob("*/state/_METADATA"):
    path.unlink()
  with pytest.raises(InputError) as caught:
    Checkpoints(folder).latest(FRESH)
  assert str(caught.value) == (
    f"No checkpoint in {folder} can be read (768, 512); remove them, so that "
    "the same command goes on from the one before, or else begins again."
  )


def test_a_checkpoint_of_another_stage_does_not_stand_for_a_damaged_one(
  tmp_path,
):
  """Its model may have fewer layers."""
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(after(1))
  checkpoints.save(dataclasses.replace(after(2), stage=1, step=0))
  assert Checkpoints(tmp_path).stage() == 1
  shutil.rmtree(tmp_path / "520" / "state")
  with pytest.raises(InputError, match=r"can be read \(520\); remove"):
    Checkpoints(tmp_path).latest(FRESH)
