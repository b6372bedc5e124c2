"""What README asks is answered rightly, and soon."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from fetching import located
from spent import at_most

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ANSWER = "The code of the cellar door is 4817."
# Of all cores. On an idle machine they are more than the time that passes.
SECONDS = 30

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path):
  """Runs Python on a CPU with JAX's settings and nothing compiled before."""
  located("smollm2-135m-instruct")  # Fetching it is not measured.
  of_tests = ("JAX_", "XLA_", "NPROC", "OPENBLAS_")
  environment = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(of_tests)
  }
  environment["JAX_PLATFORMS"] = "cpu"
  environment["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path)

  def run(*arguments):
    with at_most(SECONDS):
      done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
      )
    assert done.returncode == 0, done.stderr
    return done.stdout

  return run


def test_its_python_is_answered(run):
  (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
  said = run("-c", code)
  assert said == f"{ANSWER}\n"
  assert f"# {ANSWER}" in code


def test_its_second_command_is_answered_by_what_it_keeps(run):
  (command,) = re.findall(r"^    kvjax (compare --text.*\\\n.*)", README, re.M)
  arguments = shlex.split(command.replace("\\\n", ""))
  said = run("-m", "kvjax.experiments.main", *arguments)
  answers = dict(re.findall(r"^ (\w+ +\d+ %) .* (The code .*?) *$", said, re.M))
  full, most, half = answers.values()
  assert full == most == ANSWER
  wrong = [a != b for a, b in zip(half, ANSWER, strict=True)]
  assert sum(wrong) == 1
