"""Files of records: two runs that write to one neither mix nor lose lines."""

import concurrent.futures
import dataclasses
import fcntl

import pytest

from kvjax.errors import InputError
from kvjax.experiments.run.line_files import Line, LineFile


@dataclasses.dataclass(frozen=True)
class Shared:
  seed: int = 3


@dataclasses.dataclass(frozen=True)
class Number(Line):
  number: int

  @property
  def key(self):
    return self.number


@pytest.fixture
def path(tmp_path):
  return tmp_path / "numbers.jsonl"


def opened(path):
  return LineFile(path, Shared(), Number, "number")


def test_two_runs_do_not_write_over_each_other(path):
  one, other = opened(path), opened(path)
  one.add([Number(0)])
  one.add([Number(1)])
  with pytest.raises(InputError, match="Another run writes to"):
    other.add([Number(2)])
  one.add([Number(3)])
  assert list(opened(path).records) == [0, 1, 3]


def test_a_run_that_waits_for_another_does_not_remove_its_records(path):
  opened(path).add([Number(0)])
  waiting = opened(path)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    with path.open("ab", buffering=0) as file:
      fcntl.flock(file, fcntl.LOCK_EX)
      added = pool.submit(waiting.add, [Number(2)])
      # Long enough to open the file and to wait for the lock.
      concurrent.futures.wait([added], timeout=0.5)
      assert not added.done()
      file.write(b'{"seed": 3, "number": 1}\n')
    with pytest.raises(InputError, match="Another run writes to"):
      added.result()
  assert list(opened(path).records) == [0, 1]
