"""Starts programs on two hosts, which are processes."""

import inspect
import json
import pathlib
import socket

from processes import start_python

SCRIPT = """
import json, sys
import jax
from {module} import {name}

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
print(json.dumps({name}(*sys.argv[3:])))
"""


def start(*arguments, host, port, output, cwd=None, program="evaluate"):
  """Starts a host of two, with two CPU devices each."""
  return start_python(
    *("-m", f"kvjax.experiments.{program}"),
    *("--multihost", f"--coordinator=127.0.0.1:{port}"),
    *("--hosts=2", f"--host={host}", f"--output={output}", *arguments),
    devices=2,
    cwd=cwd,
  )


def call(function, *arguments):
  """Calls a function of a test's module on both hosts; returns its results.

  Args:
    function: returns what JSON holds.
    arguments: strings for it.
  """
  path = pathlib.Path(inspect.getfile(function))
  script = SCRIPT.format(module=path.stem, name=function.__name__)
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  both = [
    start_python(
      *("-c", script, address, str(host), *arguments),
      devices=2,
      cwd=path.parent,
    )
    for host in range(2)
  ]
  try:
    ended = [process.communicate(timeout=300) for process in both]
  finally:
    for process in both:  # They may wait for each other.
      process.kill()
  assert [process.returncode for process in both] == [0, 0], ended
  return [json.loads(said.splitlines()[-1]) for said, _ in ended]
