"""What several processes say of the answers that they share."""

import time

import pytest

from kvjax.errors import InputError
from kvjax.experiments.run import environment
from kvjax.experiments.run.processes import Processes


@pytest.fixture
def start(monkeypatch, tmp_path):
  """Starts processes that have taken some seconds, 1 of them for prefills."""
  now = [0.0]
  monkeypatch.setattr(time, "monotonic", lambda: now[0])

  def one(device, seconds, **versions):
    monkeypatch.setattr(environment, "versions", lambda: versions)
    now[0] += 100
    process = Processes(
      tmp_path / "run", device, now[0], lambda: {"prefill": 1.0}
    )
    now[0] += seconds
    return process

  return one


def test_what_differs_is_listed_and_seconds_are_added_up(start):
  # It says more and more until it is killed.
  first = start("CPU, 2 cores", 10.0, jax="1.2")
  first.note()
  first.note()
  second = start("TPU v6", 5.5, jax="1.3", torch="2")
  second.note()
  expected = {
    "device": "CPU, 2 cores and TPU v6",
    "versions": {"jax": "1.2 and 1.3", "torch": "none and 2"},
    "seconds": {"prefill": 2.0, "total": 15.5},
  }
  assert second.summary() == expected
  # One that found all done does not count.
  assert start("GPU", 7.0).summary() == expected
  third = start("TPU v6", 10.0, jax="1.3")
  third.note()
  again = third.summary()
  assert again["device"] == expected["device"]
  assert again["seconds"] == {"prefill": 3.0, "total": 25.5}


def test_what_comes_after_the_last_part_counts(start, monkeypatch):
  first = start("CPU", 10.0)
  first.note()
  later = time.monotonic() + 2
  monkeypatch.setattr(time, "monotonic", lambda: later)
  assert first.summary()["seconds"]["total"] == 12.0
  monkeypatch.undo()
  assert start("CPU", 1.0).summary()["seconds"]["total"] == 12.0


def test_a_process_has_the_versions_that_it_began_with(start, monkeypatch):
  """Packages may be upgraded while it runs, and what it has loaded stays."""
  process = start("CPU", 3.0, jax="1.2")
  monkeypatch.setattr(environment, "versions", lambda: {"jax": "1.3"})
  process.note()
  assert process.summary()["versions"] == {"jax": "1.2"}


def test_one_alone_says_what_it_says(start, tmp_path):
  process = start("CPU", 3.0, jax="1.2")
  assert process.summary() == {
    "device": "CPU",
    "versions": {"jax": "1.2"},
    "seconds": {"prefill": 1.0, "total": 3.0},
  }
  assert process.seconds == {"prefill": 1.0, "total": 3.0}
  assert not list(tmp_path.iterdir())
  process.note()
  process.remove()
  assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("content", ['{"processes": [{}]}', '{"a": 1}'])
def test_what_no_run_has_written_is_refused(tmp_path, content):
  (tmp_path / "processes.json").write_text(content)
  with pytest.raises(InputError, match=r"processes\.json is not what a run"):
    Processes(tmp_path, "CPU", 0.0)
