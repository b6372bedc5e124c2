"""Starts programs on two hosts, which are processes."""

import os
import re
import subprocess
import sys


def start(*arguments, host, port, output, cwd=None, program="evaluate"):
  """Starts a host of two, with two CPU devices each."""
  devices = re.sub(
    "device_count=[0-9]+", "device_count=2", os.environ["XLA_FLAGS"]
  )
  return subprocess.Popen(
    [
      *(sys.executable, "-m", f"kvjax.experiments.{program}", *arguments),
      *("--multihost", f"--coordinator=127.0.0.1:{port}"),
      *("--hosts=2", f"--host={host}", f"--output={output}"),
    ],
    cwd=cwd,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
