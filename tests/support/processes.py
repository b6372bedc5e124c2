"""Python processes that have CPU devices of their own."""

import inspect
import json
import os
import pathlib
import re
import subprocess
import sys

SCRIPT = """
import json, sys
from {module} import {name}

print(json.dumps({name}(*sys.argv[1:])))
"""


def start_python(*arguments, devices, cwd=None):
  """Starts Python with a number of CPU devices; its output is kept."""
  flags = re.sub(
    "device_count=[0-9]+", f"device_count={devices}", os.environ["XLA_FLAGS"]
  )
  path = [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH")]
  return subprocess.Popen(
    [sys.executable, *arguments],
    cwd=cwd,
    env=os.environ
    | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def call_with_devices(devices, function, *arguments):
  """Calls a function of a test's module in a process; returns its result.

  Args:
    devices: number of the process's CPU devices.
    function: returns what JSON holds.
    arguments: strings for it.
  """
  path = pathlib.Path(inspect.getfile(function))
  script = SCRIPT.format(module=path.stem, name=function.__name__)
  process = start_python(
    "-c", script, *arguments, devices=devices, cwd=path.parent
  )
  try:
    said, errors = process.communicate(timeout=600)
  finally:
    process.kill()
  assert process.returncode == 0, errors
  return json.loads(said.splitlines()[-1])
