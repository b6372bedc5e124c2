"""OpenBLAS factorizes a head's matrices in one thread."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

_SOURCE = """
import ctypes, os, sys
from kvjax.methods.leverage import leverage
{before}
import jax, jax.numpy as jnp
before = dict(os.environ)
keys = jax.random.normal(jax.random.key(0), (1, 1, 8, 4))
leverage(keys, jnp.ones((1, 1, 8), bool), None, "svd", False)
assert dict(os.environ) == before
with open("/proc/self/maps") as maps:
  files = {{line.split()[-1] for line in maps if "libscipy_openblas-" in line}}
for file in files:
  print(ctypes.CDLL(file).scipy_openblas_get_num_threads())
"""


def threads(before="", **variables):
  """Counts those that it has, by a process; skips where it is not SciPy's."""
  environment = {
    name: value
    for name, value in os.environ.items()
    if name not in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
  }
  source = _SOURCE.format(before=before)
  found = subprocess.run(
    [sys.executable, "-c", source],
    check=True,
    capture_output=True,
    text=True,
    env=environment | variables,
  ).stdout
  if not found:
    pytest.skip("SciPy has another library here.")
  return int(found)


@pytest.mark.skipif(sys.platform != "linux", reason="It reads /proc.")
def test_it_has_one_thread_unless_told_otherwise():
  assert threads() == 1
  # Not more than there are cores.
  told = min(2, len(os.sched_getaffinity(0)))
  assert threads(OPENBLAS_NUM_THREADS="2") == told
  assert threads(OMP_NUM_THREADS="2") == told
  # Whoever loads it before may want threads.
  cores = len(os.sched_getaffinity(0))
  assert threads("import scipy.linalg") == cores


@pytest.mark.parametrize(
  "module", ["papers.analyses.observed", "papers.registry", "calibrate"]
)
def test_no_import_loads_it_before(module):
  source = (
    f"import sys, kvjax.experiments.{module}; "
    "assert 'scipy.linalg' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", source], check=True)


def test_whatever_factorizes_loads_it_with_one_thread():
  root = pathlib.Path(__file__).parents[2]
  calls = re.compile(
    r"(jnp|jax\.numpy|jax\.scipy|lax)\.linalg\."
    r"(?!norm\b)\w+|^\s*(from|import) scipy",
    re.MULTILINE,
  )
  using = {
    file.name: "openblas.load()" in source
    for folder in ("kvjax", "experiments", "kernels", "models")
    for file in (root / folder).rglob("*.py")
    if calls.search(source := file.read_text())
  }
  assert using.keys() >= {"leverage.py", "shape.py", "anova.py"}
  without = {name for name, loads in using.items() if not loads}
  assert without == {"openblas.py"}
