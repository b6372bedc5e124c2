"""A benchmark is one class and one line: a toy one runs as the others do."""

import json
import pathlib
import subprocess
import sys
import textwrap

import pytest

from kvjax.experiments.benchmarks import registry
from kvjax.experiments.benchmarks.base import Presentation, Request
from kvjax.experiments.benchmarks.options import DEPTHS

_PROGRAM = textwrap.dedent("""\
  from kvjax.experiments.benchmarks import registry
  from kvjax.experiments.benchmarks.base import Benchmark, Drawn, Presentation
  from kvjax.experiments.benchmarks.options import Option
  from kvjax.experiments.metrics.registry import METRICS
  from kvjax.experiments.run.results import Part
  from kvjax.experiments.tasks.sample import Sample

  SHADE = Option("shade", "dark", "Its shade.", choices=("dark", "pale"))

  class Colors(Benchmark):
    name = "colors"
    options = (SHADE,)
    lengths = (64,)
    presentation = Presentation(score="hue", scored="colors named")

    def total(self, request):
      return request.samples

    def draw(self, lm, request):
      shade = request.value(SHADE)
      drawn = []
      for number in range(request.samples):
        drawn.append(Sample(
          context=f"The door is of a {shade} red. " * (number + 4),
          question="What is the color of the door?",
          answer_prefix="", answers=("red",), task="door", max_new_tokens=2,
          metadata={}, metric="hue",
        ))
        request.on_draw("door", 1)
      (length,) = self.lengths_of(request)
      return Drawn({Part("door", length): drawn}, {"shade": shade})

  METRICS["hue"] = lambda sample, text: {"score": float("red" in text)}
  registry.BENCHMARKS[Colors.name] = Colors()

  from kvjax.experiments import cli, evaluate
  cli.run(evaluate.main)
""")


@pytest.fixture
def colors(tmp_path, tiny_directory):
  program = tmp_path / "colors.py"
  program.write_text(_PROGRAM)

  def run(*arguments):
    command = [sys.executable, str(program), f"--model={tiny_directory}"]
    command += ["--methods=streaming:sinks=2", "--retention=1,0.5"]
    command += [f"--output={tmp_path / 'out'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)

  return run


def test_a_benchmark_of_ones_own_runs_as_the_others_do(colors, tmp_path):
  done = colors("--benchmark=colors", "--shade=pale", "--samples=2")
  assert done.returncode == 0, done.stderr
  (folder,) = pathlib.Path(tmp_path / "out").iterdir()
  assert folder.name.startswith("colors__tiny__query-agnostic")
  lines = (folder / "samples.jsonl").read_text().splitlines()
  answers = [json.loads(line) for line in lines]
  assert {answer["task"] for answer in answers} == {"door"}
  assert {answer["data"]["shade"] for answer in answers} == {"pale"}
  assert len(answers) == 4
  assert "hue" in (folder / "report.md").read_text()

  done = colors("--shade=pale", "--samples=2")
  assert done.returncode == 2
  assert "--shade belongs to --benchmark=colors, not to ruler." in done.stderr


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
