"""Ctrl-C in the middle of what JAX does not interrupt."""

import signal
import subprocess
import sys
import time

import pytest

SECONDS = 2.0


def wait_for_cost(process, folder):
  """Waits until the first program compiles."""
  assert "contexts of" in process.stderr.readline()
  time.sleep(1.5)
  assert not folder.exists()


def wait_for_answers(process, folder):
  """Waits until answers to a context are there, and others on their way."""
  path = folder / "samples.jsonl"
  while not (path.exists() and path.read_text().count("\n") > 3):
    assert process.poll() is None
    time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("wait", [wait_for_cost, wait_for_answers])
def test_a_run_stops_within_two_seconds(tmp_path, wait, monkeypatch):
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
  folder = tmp_path / "run"
  command = [
    *(sys.executable, "-m", "kvjax.experiments.compare", "--model=reference"),
    *("--methods=keydiff", "--samples=50", "--batch=4", f"--output={folder}"),
  ]
  with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
    wait(process, folder)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    code = process.wait(60)
    elapsed = time.monotonic() - began
    assert process.stderr.read().endswith("Stopped.\n")
  assert code == 130
  assert elapsed < SECONDS
