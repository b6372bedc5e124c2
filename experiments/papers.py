"""Runs the experiments of the five papers, their numbers beside ours.

  python -m kvjax.experiments.papers

lists them, and

  python -m kvjax.experiments.papers E5.1 --model=DIR --data=DIR

runs one, or several, on a model and on data of yours: LongBench's files, or
RULER's where these are not to be made here. Without them the bundled model
answers generated prompts at budgets scaled down to its size. It is not the
papers' model: the order of methods may be compared, their numbers not.

Writes results/papers/ID/MODEL/paper.md and paper.json, beside a folder for each
run with all of its answers. A run that was stopped goes on where it stopped.
"""

import pathlib
from collections.abc import Sequence

import rich.console
from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli, inputs, results, text_inputs
from kvjax.experiments.benchmarks import hub
from kvjax.experiments.paper_experiments import (
  catalogue,
  registry,
  report,
  running,
)
from kvjax.experiments.paper_experiments.samples import Sources

for module in (inputs, text_inputs):
  flags.adopt_module_key_flags(module)

_DATA = flags.DEFINE_string(
  "data",
  None,
  "File or folder of published samples of LongBench or RULER, or the name of "
  "such a data set of the Hugging Face hub.",
)
_SAMPLES = flags.DEFINE_integer(
  "samples",
  None,
  "Samples per task and length, and depth or round; by default the paper's, or "
  "few without its model.",
  lower_bound=1,
)
_LENGTH = flags.DEFINE_integer(
  "length",
  None,
  "Tokens of prompt and answer in place of an experiment's own; of LongBench's "
  "prompts the most.",
  lower_bound=1,
)
_OUTPUT = flags.DEFINE_string(
  "output", "results/papers", "Folder for the folders of experiments."
)


def main(ids: Sequence[str]) -> None:
  """Lists all experiments, or runs those that are named."""
  console = rich.console.Console(highlight=False)
  if not ids:
    console.print(catalogue.terminal())
    return
  chosen = registry.find(ids)
  given = _given()
  if "data" in given and "model" not in given:
    raise InputError(
      "--data needs a --model that can answer it; the bundled one answers "
      "needle questions only."
    )
  sources = _sources()
  output = pathlib.Path(_OUTPUT.value)
  results.check_writable(output)
  name = inputs.model_name().replace("/", "--")  # org/name of a hub's model
  folders = {e.id: output / e.id / name for e in chosen}
  for experiment in chosen:
    if experiment.why_not:
      report.refuse(experiment, console)
  # Before the model is loaded here: a device has hardly room for two.
  for experiment in chosen:
    if experiment.programs:
      own = folders[experiment.id]
      report.call(experiment, inputs.model_name(), given, own, console)
  left = [e for e in chosen if e.parts and not e.programs]
  if not left:
    return
  with inputs.loaded() as (lm, devices):
    session = running.Session(
      lm,
      devices,
      "model" in given,
      _settings(),
      inputs.BATCH.value,
      sources,
      _SAMPLES.value,
      _LENGTH.value,
    )
    for experiment in left:
      report.run(experiment, session, folders[experiment.id], console)


def _given() -> dict[str, str]:
  """The flags that stand on the command line."""
  every = flags.FLAGS
  return {name: str(every[name].value) for name in every if every[name].present}


def _settings() -> results.Settings:
  return results.Settings(
    model=inputs.model_name(),
    weights=results.digest(inputs.model_directory()),
    dtype=inputs.dtype(),
    seed=inputs.SEED.value,
  )


def _sources() -> Sources:
  data = None if _DATA.value is None else hub.resolved(_DATA.value)
  return Sources(data, text_inputs.texts())


if __name__ == "__main__":
  cli.run_on_arguments(main)
