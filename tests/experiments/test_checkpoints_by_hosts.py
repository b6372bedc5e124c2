"""Two hosts go on from the same checkpoint where one of them misses files."""

import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from two_hosts import call

from kvjax.cache.sharding import parse_mesh
from kvjax.experiments.reference.progress import Checkpoints, Progress
from kvjax.experiments.run import multihost

NUMBERS = np.arange(2000, dtype=np.float32)


def after(steps):
  """The progress after some steps, spread over the devices of both hosts."""
  own = NamedSharding(parse_mesh("data:4"), PartitionSpec("data"))
  params = {"a": jax.device_put(NUMBERS + steps, own)}
  moments = {"a": jax.device_put(NUMBERS * steps, own)}
  return Progress(params, moments, total=steps, step=steps)


def total(found):
  """Steps of a progress, if a host has their values."""
  wanted = after(found.total)
  for x, y in zip(
    jax.tree.leaves((found.params, found.moments)),
    jax.tree.leaves((wanted.params, wanted.moments)),
    strict=True,
  ):
    for one, other in zip(
      x.addressable_shards, y.addressable_shards, strict=True
    ):
      np.testing.assert_array_equal(one.data, other.data)
  return found.total


def go_on(folder, lost):
  """Loses files of the newest of two checkpoints, and takes its step again."""
  folder = pathlib.Path(folder)
  for steps in (1, 2):
    Checkpoints(folder).save(after(steps))

  def lose():
    found = list(folder.glob(f"512/state/{lost}"))
    assert found
    for path in found:
      path.unlink()

  multihost.on_first(lose)
  checkpoints = Checkpoints(folder)
  before = total(checkpoints.latest(after(0)))
  checkpoints.save(after(2))
  return [before, total(Checkpoints(folder).latest(after(0)))]


@pytest.mark.parametrize(
  "lost",
  [
    pytest.param("_METADATA", marks=pytest.mark.slow),
    pytest.param("d/*", marks=pytest.mark.slow),
    "ocdbt.process_1/d/*",
  ],
)
def test_hosts_pass_over_a_damaged_checkpoint_together(lost, tmp_path):
  """The last files have what one of the hosts alone reads."""
  assert call(go_on, str(tmp_path), lost) == 2 * [[1, 2]]
