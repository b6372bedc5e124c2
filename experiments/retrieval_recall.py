"""Measures the recall of retrieval methods.

  kvjax retrieval_recall

prefills needle prompts with their questions, decodes with the full cache, and
lets each retrieval method retrieve keys for the model's real queries. It prints
a table and writes results/retrieval/{summary.json,table.md}. The numbers are
means over tasks, samples, tokens, heads and the layers with an index:

- recall: share of the stored keys of exact search that are retrieved;
- output error: |o - o_dense| / |o_dense| of a head's attention output;
- read: tokens attended to, including resident ones.

Decoding continues for --steps tokens, even past the end of an answer.

Below the table is the mean cosine of neighboring queries per layer, which CTkvr
relies on. It takes two minutes on two cores.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

import kvjax
from kvjax import models
from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.inputs import (
  budget_inputs,
  essay_inputs,
  needle_inputs,
  run_inputs,
)
from kvjax.experiments.report import benchmark_tables
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run import (
  environment,
  outputs,
  progress_bar,
  retrieval_quality,
)
from kvjax.experiments.run.candidates import Candidate, candidates
from kvjax.experiments.run.prompting import (
  QUERY_AWARE,
  Prompt,
  Shape,
  check_context_length,
)
from kvjax.experiments.run.retrieval_quality import Quality
from kvjax.experiments.tasks import suite
from kvjax.registry.registry import RETRIEVALS

flags.adopt_module_key_flags(run_inputs)
flags.adopt_module_key_flags(needle_inputs)
flags.adopt_module_key_flags(budget_inputs)
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
  folder = outputs.folder(_OUTPUT.value)
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
  with run_inputs.loaded() as (lm, devices):
    quality_of, cosines = _measure(lm, chosen)
    settings = dataclasses.replace(
      run_inputs.settings(), data=origins, protocol=QUERY_AWARE
    )
  summary = dataclasses.asdict(settings) | {
    "length": needle_inputs.LENGTH.value,
    "samples": needle_inputs.SAMPLES.value,
    "tasks": needle_inputs.TASKS.value,
    "steps": _STEPS.value,
    "device": environment.device(devices),
    "versions": environment.versions(),
    "cosine_of_neighboring_queries": cosines,
    "rows": [
      {
        "method": c.method,
        "options": c.options,
        "budget": c.budget,
        **quality._asdict(),
      }
      for c, quality in zip(chosen, quality_of, strict=True)
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
      f"{100 * row['recall']:.1f}",
      f"{100 * row['error']:.1f}",
      f"{row['read']:.0f}",
    )
    for row in rows
  ]
  head = ("method", "retrieves", "recall %", "output error %", "read")
  return Table("", head, lines, names=2)


def _measure(
  lm: models.Pretrained, chosen: Sequence[Candidate]
) -> tuple[list[Quality], list[float]]:
  """Measures every candidate's means and every layer's cosine."""
  prompts = [
    Prompt.of_sample(lm.text, sample)
    for drawn in needle_inputs.samples(lm).values()
    for sample in drawn
  ]
  check_context_length(lm, prompts)
  shape = Shape.of(prompts, run_inputs.batch(), QUERY_AWARE)
  quality_of: list[list[Quality]] = [[] for _ in chosen]
  cosines, sizes = [], []
  starts = range(0, len(prompts), shape.rows)
  for start in progress_bar.track(starts):
    rows = prompts[start : start + shape.rows]
    contexts = kvjax.Prompts.of([p.prefilled for p in rows], shape.context)
    plans = [candidate.plan for candidate in chosen]
    qualities, cosine = retrieval_quality.measure(
      lm.model, lm.params, contexts, plans, _STEPS.value
    )
    cosines.append(cosine)
    sizes.append(len(rows))
    for of_candidate, per_layer in zip(quality_of, qualities, strict=True):
      of_candidate.append(retrieval_quality.mean(per_layer))
  return [_mean(of_candidate, sizes) for of_candidate in quality_of], [
    statistics.fmean(layer, sizes) for layer in zip(*cosines, strict=True)
  ]


def _mean(quality_of: Sequence[Quality], sizes: Sequence[int]) -> Quality:
  """Averages over batches of these sizes."""
  values = zip(*quality_of, strict=True)
  return Quality(*(statistics.fmean(each, sizes) for each in values))


if __name__ == "__main__":
  cli.run(main)
