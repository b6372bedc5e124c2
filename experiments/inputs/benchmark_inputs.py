"""Flags for the benchmark, and the samples they select."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import refusals
from kvjax.experiments.benchmarks.base import Benchmark, Drawn, Option, Request
from kvjax.experiments.benchmarks.registry import BENCHMARKS
from kvjax.experiments.inputs import (
  essay_inputs,
  method_inputs,
  run_inputs,
  text_inputs,
)
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.experiments.run.prompting import Protocol
from kvjax.experiments.tasks import suite
from kvjax.models.pretrained import Pretrained

flags.adopt_module_key_flags(text_inputs)

_BENCHMARK = flags.DEFINE_enum(
  "benchmark", "ruler", list(BENCHMARKS), "Benchmark to run."
)
_TASKS = flags.DEFINE_list(
  "tasks", None, "Tasks of RULER or datasets of LongBench; default: all."
)
_LENGTH = flags.DEFINE_list(
  "length",
  None,
  "Tokens of prompt and answer, without the chat template; the default is "
  "2,048 for RULER and 1,024 for other generated benchmarks. For LongBench, "
  "the maximum prompt length, reached by cutting out the middle; the default "
  "is the longest that fits the model's context.",
)
_SAMPLES = flags.DEFINE_integer(
  "samples",
  None,
  "Samples per task and length, or per length and depth, or conversations per "
  "length, or problems; the defaults are 20, 3, 10 and 20, and all samples of "
  "files.",
  lower_bound=1,
  upper_bound=run_inputs.MOST_SAMPLES,
)
_DATA = flags.DEFINE_string(
  "data",
  None,
  "File or folder with published samples of RULER, LongBench, MATH-500 or AIME "
  "2025, or the name of such a dataset on the Hugging Face hub, such as "
  "simonjegou/ruler.",
)


def _define(option: Option) -> flags.FlagHolder[Any]:
  """Defines the flag of an option."""
  name, default, text = option.name, option.default, option.help
  if option.choices:
    return flags.DEFINE_enum(name, default, list(option.choices), text)
  if option.type is bool:
    return flags.DEFINE_bool(name, default, text)
  if option.type is str:
    return flags.DEFINE_string(name, default, text)
  define: Callable[..., flags.FlagHolder[Any]] = (
    flags.DEFINE_integer if option.type is int else flags.DEFINE_float
  )
  return define(
    name, default, text, lower_bound=option.lowest, upper_bound=option.highest
  )


_OPTIONS: Mapping[str, flags.FlagHolder[Any]] = {
  option.name: _define(option)
  for option in dict.fromkeys(
    option for each in BENCHMARKS.values() for option in each.options
  )
}


def _owners() -> dict[str, list[str]]:
  """Lists the benchmarks that read each flag which not all of them read."""
  owners: dict[str, list[str]] = {}
  for name, benchmark in BENCHMARKS.items():
    own = [option.name for option in benchmark.options]
    for flag in (*benchmark.inputs, *own):
      owners.setdefault(flag, []).append(name)
  return owners


def chosen() -> Benchmark:
  """Returns the benchmark of --benchmark."""
  return BENCHMARKS[_BENCHMARK.value]


def protocol() -> Protocol:
  """Returns whether the question is known before compression."""
  return chosen().protocol(method_inputs.protocol())


def check_flags() -> None:
  """Rejects flags that do not suit the benchmark.

  Raises:
    InputError: a flag belongs to another benchmark, a length is no integer, a
      task does not exist, or see `Benchmark.check`.
  """
  request, benchmark = _request(), chosen()
  for flag, owners in _owners().items():
    if flags.FLAGS[flag].present and benchmark.name not in owners:
      raise InputError(
        f"--{flag} belongs to --benchmark={', '.join(owners[:-1])}"
        f"{' and ' if owners[1:] else ''}{owners[-1]}, not to {benchmark.name}."
      )
  if _DATA.value is not None:
    refusals.refuse_together(
      "data", text_inputs.NAMES, "they are for samples that are made here"
    )
  if request.tasks is not None:
    suite.check_tasks(request.tasks, benchmark.tasks)
  if request.data is None and "essay" in benchmark.inputs:
    request.texts()
  benchmark.check(request)


def draw(lm: Pretrained) -> Drawn:
  """Draws the samples that the flags select.

  Raises:
    InputError: a length is too short for a task or longer than the model's
      context, a task does not exist, or a file cannot be read.
  """
  request, benchmark = _request(), chosen()
  lengths = benchmark.lengths_of(request)
  if request.data is None and lengths:
    run_inputs.check_lengths(lm, lengths)
  with progress_bar(
    benchmark.total(request), "drawing", transient=True
  ) as on_draw:
    drawn = benchmark.draw(lm, dataclasses.replace(request, on_draw=on_draw))
  return drawn.checked()


def _request() -> Request:
  """Collects the values of all flags."""
  # Only RULER's cwe takes a file of words.
  reads_questions = set(text_inputs.CORPORA) <= {*chosen().inputs}
  return Request(
    seed=run_inputs.SEED.value,
    tasks=_TASKS.value,
    lengths=None
    if _LENGTH.value is None
    else run_inputs.parse_lengths(_LENGTH.value),
    samples=_SAMPLES.value,
    data=_DATA.value,
    texts=(text_inputs if reads_questions else essay_inputs).texts,
    protocol=protocol(),
    options={name: flag.value for name, flag in _OPTIONS.items()},
  )
