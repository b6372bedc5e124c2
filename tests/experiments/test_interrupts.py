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


_COMMAND = """
import sys
import kvjax_command

print("ready", flush=True)
sys.argv = ["kvjax", "compare", "--model=reference", "--output", sys.argv[1]]
kvjax_command.main()
"""


@pytest.mark.parametrize("seconds", [0.2, 0.6, 1.0, 1.4])
def test_the_command_stops_while_it_imports(tmp_path, seconds):
  command = [sys.executable, "-c", _COMMAND, str(tmp_path / "run")]
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    assert process.wait(SECONDS) == 130
    assert process.stderr.read() == "Stopped.\n"


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
