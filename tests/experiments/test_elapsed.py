"""How long a run has taken, over the processes that it was interrupted in."""

import time

from kvjax.experiments.run.elapsed import Elapsed


def test_the_time_of_interrupted_processes_counts(tmp_path):
  for seconds in (100, 20):
    process = Elapsed(tmp_path, "CPU", time.monotonic() - seconds)
    process.note()
  last = Elapsed(tmp_path, "TPU", time.monotonic() - 3)
  last.note()
  found = last.summary()
  assert 123 <= found["seconds"] < 133
  assert found["device"] == "CPU and TPU"
  assert "jax" in found["versions"]


def test_a_process_that_found_all_done_does_not_count(tmp_path):
  Elapsed(tmp_path, "CPU", time.monotonic() - 100).note()
  idle = Elapsed(tmp_path, "TPU", time.monotonic() - 50)
  assert 100 <= idle.summary()["seconds"] < 110
  idle.remove()
  assert not list(tmp_path.iterdir())
  alone = Elapsed(tmp_path, "TPU", time.monotonic() - 50)
  assert 50 <= alone.summary()["seconds"] < 60
