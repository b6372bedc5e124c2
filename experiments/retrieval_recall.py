"""Measures the recall of retrieval methods.

  kvjax retrieval_recall

prefills needle prompts with their questions, decodes with the full cache, and
lets each retrieval method retrieve keys for the model's real queries. It prints
a table and writes results/retrieval/{summary.json,table.md}, and every batch to
batches.jsonl, from which an interrupted run resumes. The numbers are means over
tasks, samples, tokens, heads and the layers with an index, those of recall and
error with 95 % intervals over samples:

- recall: share of the stored keys of exact search that are retrieved;
- output error: |o - o_dense| / |o_dense| of a head's attention output;
- read: tokens attended to, including resident ones.

Decoding continues for --steps tokens, even past the end of an answer.

Below the table is the mean cosine of neighboring queries per layer, which CTkvr
relies on. It takes two minutes on two cores. With `--multihost`, hosts that run
the same command share the prompts.
"""

import collections
import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

import kvjax
from kvjax import models
from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.inputs import (
  budget_inputs,
  essay_inputs,
  host_inputs,
  needle_inputs,
  run_inputs,
)
from kvjax.experiments.report import benchmark_tables
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run import (
  comparison,
  environment,
  intervals,
  multihost,
  outputs,
  progress_bar,
  results,
  retrieval_quality,
)
from kvjax.experiments.run.candidates import Candidate, candidates
from kvjax.experiments.run.line_files import Line, LineFile
from kvjax.experiments.run.prompting import (
  QUERY_AWARE,
  Prompt,
  Shape,
  check_context_length,
)
from kvjax.experiments.run.retrieval_quality import Quality
from kvjax.experiments.tasks import suite
from kvjax.registry.registry import RETRIEVALS

for module in (run_inputs, needle_inputs, budget_inputs, host_inputs):
  flags.adopt_module_key_flags(module)
# What a token reads is fixed; a share of the prompt would grow with it.
flags.set_default(budget_inputs.BUDGET, ["512", "128"])

_METHODS = flags.DEFINE_list(
  "methods", list(RETRIEVALS), "Retrieval methods or presets, with options."
)
_STEPS = flags.DEFINE_integer(
  "steps",
  24,
  "Tokens to decode per prompt.",
  lower_bound=1,
  upper_bound=100_000,
)
_OUTPUT = flags.DEFINE_string("output", "results/retrieval", "Output folder.")


def main() -> None:
  """Checks all flags, then loads the model and measures."""
  suite.check_tasks(needle_inputs.TASKS.value)
  origins = essay_inputs.texts().needle_origins
  outputs.check_run(_OUTPUT.value, writes=True)
  budgets = budget_inputs.budgets()
  seed = run_inputs.SEED.value
  named = candidates(_METHODS.value, budgets, seed=seed)
  chosen = [candidate for candidate in named if candidate.plan.sparse]
  if not chosen:
    raise InputError(
      f"None of --methods looks anything up; retrieval methods are "
      f"{', '.join(RETRIEVALS)}."
    )
  cli.announce()
  folder = outputs.run_folder(_OUTPUT.value)
  with run_inputs.loaded() as (lm, devices):
    settings = dataclasses.replace(
      run_inputs.settings(), data=origins, protocol=QUERY_AWARE
    )
    samples = needle_inputs.samples(lm)
    comparison.check_hosts(settings, comparison.wanted(chosen, samples))
    run = _run(settings, chosen)
    means_of, cosines = _measure(lm, chosen, samples, run, folder)
    # Within the mesh, which says where it was.
    device = environment.device(devices)
  if not multihost.is_first():
    return
  summary = dataclasses.asdict(run) | {
    "device": device,
    "versions": environment.versions(),
    "cosine_of_neighboring_queries": cosines,
    "rows": [
      {"method": c.method, "options": c.options, "budget": c.budget, **means}
      for c, means in zip(chosen, means_of, strict=True)
    ],
  }
  outputs.write_json(folder / "summary.json", summary)
  layers = ", ".join(f"{cosine:.2f}" for cosine in cosines)
  benchmark_tables.show(
    folder,
    table(summary["rows"]),
    f"{settings.model}, {summary['length']} tokens, {settings.protocol}, "
    f"{summary['samples']} samples per task, {summary['steps']} tokens each. "
    f"Cosine of neighboring queries, layer by layer: {layers}. Seed "
    f"{settings.seed}, greedy, {settings.dtype} on {summary['device']}",
  )


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Builds the table of rows of summary.json."""
  lines = [
    (
      row["method"],
      row["budget"],
      _with_interval(row, "recall"),
      _with_interval(row, "error"),
      f"{row['read']:.0f}",
    )
    for row in rows
  ]
  head = ("method", "retrieves", "recall %", "output error %", "read")
  return Table("", head, lines, names=2)


def _with_interval(row: Mapping[str, Any], name: str) -> str:
  """Formats a share and its 95 % interval in percent: `87.7 (86.0–89.1)`."""
  if not row["intervals"]:
    return f"{100 * row[name]:.1f}"
  ends = "–".join(f"{100 * end:.1f}" for end in row["intervals"][name])
  return f"{100 * row[name]:.1f} ({ends})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run(results.Settings):
  """What all batches of a file share.

  Attributes:
    length: --length.
    samples: --samples.
    tasks: --tasks.
    steps: --steps.
    batch: prompts of a batch.
    candidates: methods with all their options, and their budgets.
  """

  length: int
  samples: int
  tasks: list[str]
  steps: int
  batch: int
  candidates: list[str]


def _run(settings: results.Settings, chosen: Sequence[Candidate]) -> _Run:
  return _Run(
    **dataclasses.asdict(settings),
    length=needle_inputs.LENGTH.value,
    samples=needle_inputs.SAMPLES.value,
    tasks=needle_inputs.TASKS.value,
    steps=_STEPS.value,
    batch=run_inputs.batch(),
    candidates=[f"{c.method}, {c.options}, {c.budget}" for c in chosen],
  )


@dataclasses.dataclass(frozen=True)
class _Batch(Line):
  """What is measured on the prompts of a batch.

  Attributes:
    number: number of the batch.
    cosines: the cosine of neighboring queries of each layer.
    qualities: the means of each candidate, as `Quality` has them, for every
      row.
  """

  number: int
  cosines: list[float]
  qualities: list[list[list[float]]]

  @property
  def key(self) -> int:
    """Identifies the batch in its file."""
    return self.number


def _measure(
  lm: models.Pretrained,
  chosen: Sequence[Candidate],
  samples: results.Samples,
  run: _Run,
  folder: pathlib.Path,
) -> tuple[list[dict[str, Any]], list[float]]:
  """Measures every candidate and every layer's cosine.

  Returns:
    The means of each candidate, as rows of summary.json have them; and the mean
    cosine of neighboring queries of each layer.
  """
  prompts = [
    (
      part.task,
      # Answers are as long as asked for, whatever the task says.
      dataclasses.replace(
        Prompt.of_sample(lm.text, sample), max_new_tokens=run.steps
      ),
    )
    for part, drawn in samples.items()
    for sample in drawn
  ]
  tasks = [task for task, _ in prompts]
  check_context_length(lm, [prompt for _, prompt in prompts])
  shape = Shape.of([p for _, p in prompts], run.batch, QUERY_AWARE)
  plans = [candidate.plan for candidate in chosen]
  batches = list(itertools.batched(prompts, shape.rows))

  def measure(number: int) -> Iterator[list[_Batch]]:
    tokens = [prompt.prefilled for _, prompt in batches[number]]
    contexts = kvjax.Prompts.of(tokens, shape.context)
    found, cosines = retrieval_quality.measure(
      lm.model, lm.params, contexts, plans, run.steps
    )
    means = map(retrieval_quality.mean, found)
    qualities = [[each.tolist() for each in quality] for quality in means]
    yield [_Batch(number, cosines, qualities)]

  file = LineFile(folder / "batches.jsonl", run, _Batch, "measurement")
  left = [n for n in range(len(batches)) if n not in file.records]
  with progress_bar.progress_bar(
    len(left), "measuring", transient=True
  ) as advance:
    for records in file.share(left, measure):
      file.add(records)
      advance("measuring", len(records))
  measured = [file.records[number] for number in range(len(batches))]
  of_layers = zip(*(batch.cosines for batch in measured), strict=True)
  of_candidates = zip(*(batch.qualities for batch in measured), strict=True)
  return [
    _means([Quality(*map(np.asarray, each)) for each in qualities], tasks)
    for qualities in of_candidates
  ], [statistics.fmean(cosines, map(len, batches)) for cosines in of_layers]


def _means(batches: Sequence[Quality], tasks: Sequence[str]) -> dict[str, Any]:
  """Averages over the rows of all batches.

  There are intervals, too, if each task has more than one row.

  Args:
    batches: the means of every row of a batch.
    tasks: tasks of all rows, in the order of the batches.
  """
  of_rows = Quality(*map(np.concatenate, zip(*batches, strict=True)))
  means = {name: float(v.mean()) for name, v in of_rows._asdict().items()}
  ends: dict[str, tuple[float, float]] = {}
  if min(collections.Counter(tasks).values()) > 1:
    for name in ("recall", "error"):
      by_task: dict[str, list[float]] = {}
      for task, value in zip(tasks, getattr(of_rows, name), strict=True):
        by_task.setdefault(task, []).append(float(value))
      ends[name] = intervals.of_values(by_task)
  return {**means, "intervals": ends}


if __name__ == "__main__":
  cli.run(main, sends=True, connect=host_inputs.start)
