"""A benchmark is one folder and one line: a toy one runs as the others do."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import colors
import pytest
from colors.metric import hue

from kvjax.experiments.benchmarks import registry
from kvjax.experiments.benchmarks.base import Presentation, Request
from kvjax.experiments.benchmarks.needle.definition import DEPTHS
from kvjax.experiments.metrics import registry as metrics
from kvjax.experiments.tasks.sample import Sample

# The line, and what starts `kvjax evaluate`.
_PROGRAM = textwrap.dedent("""\
  from colors.definition import Colors
  from kvjax.experiments.benchmarks import registry

  registry.BENCHMARKS[Colors.name] = Colors()

  from kvjax.experiments import cli, evaluate
  cli.run(evaluate.main)
""")
SUPPORT = pathlib.Path(colors.__file__).parents[1]


@pytest.fixture
def evaluate(tmp_path, tiny_directory):
  program = tmp_path / "program.py"
  program.write_text(_PROGRAM)

  def run(*arguments):
    command = [sys.executable, str(program), f"--model={tiny_directory}"]
    command += ["--methods=streaming:sinks=2", "--retention=1,0.5"]
    command += [f"--output={tmp_path / 'out'}", *arguments]
    paths = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
      command, capture_output=True, text=True, check=False, env=environment
    )

  return run


def test_a_benchmark_of_ones_own_runs_as_the_others_do(evaluate, tmp_path):
  done = evaluate("--benchmark=colors", "--shade=pale", "--samples=2")
  assert done.returncode == 0, done.stderr
  (folder,) = pathlib.Path(tmp_path / "out").iterdir()
  assert folder.name.startswith("colors__tiny__query-agnostic")
  lines = (folder / "samples.jsonl").read_text().splitlines()
  answers = [json.loads(line) for line in lines]
  assert {answer["task"] for answer in answers} == {"door"}
  assert {answer["data"]["shade"] for answer in answers} == {"pale"}
  assert len(answers) == 4
  for answer in answers:
    assert answer["scores"].keys() == {"score", "shade", "first_key_token"}
    assert answer["scored_by"] == {"shade": "pale"}
  assert "hue" in (folder / "report.md").read_text()

  done = evaluate("--shade=pale", "--samples=2")
  assert done.returncode == 2
  assert "--shade belongs to --benchmark=colors, not to ruler." in done.stderr


@pytest.fixture
def with_hue(monkeypatch):
  """Leaves the registry to other tests as it was."""
  monkeypatch.setattr(metrics, "METRICS", {**metrics.METRICS})
  metrics.register("hue", hue)


def test_a_metric_of_ones_own_scores_as_the_others_do(with_hue):
  metadata = {"shade": "pale"}
  sample = Sample("", "", "", ("red",), "door", 4, metadata, metric="hue")
  said = "a pale red"
  assert metrics.score(sample, said) == {"score": 1, "shade": 1}
  assert metrics.score(sample, said, is_cut=True) == {"score": 0, "shade": 0}


def test_a_metric_does_not_replace_another(with_hue):
  metrics.register("hue", hue)
  with pytest.raises(ValueError, match="a metric 'hue' already"):
    metrics.register("hue", lambda sample, said: {"score": 1.0})


@pytest.mark.parametrize("name", registry.BENCHMARKS)
def test_options_and_inputs_are_of_the_benchmark_that_names_them(name):
  benchmark = registry.BENCHMARKS[name]
  assert benchmark.name == name
  shared = {option.name for option in benchmark.options} & {*benchmark.inputs}
  assert not shared
  assert ("tasks" in benchmark.inputs) == bool(benchmark.tasks)


def test_requests_have_the_defaults_of_options():
  assert Request().value(DEPTHS) == 10
  assert Request(options={"depths": 3}).value(DEPTHS) == 3


def test_results_without_a_benchmark_are_shown_plainly():
  assert registry.presentation("needles") == Presentation()
  assert registry.presentation("passkey").score == "exact"
