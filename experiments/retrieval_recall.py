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
relies on. It takes two minutes on two cores. With `--multihost`, hosts that run
the same command share the prompts.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
  multihost,
  outputs,
  progress_bar,
  results,
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
flags.adopt_module_key_flags(host_inputs)
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
  host_inputs.start()
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
    settings = dataclasses.replace(
      run_inputs.settings(), data=origins, protocol=QUERY_AWARE
    )
    samples = needle_inputs.samples(lm)
    comparison.check_hosts(settings, comparison.wanted(chosen, samples))
    quality_of, cosines = _measure(lm, chosen, samples)
    # Within the mesh, which says where it was.
    device = environment.device(devices)
  if not multihost.is_first():
    return
  summary = dataclasses.asdict(settings) | {
    "length": needle_inputs.LENGTH.value,
    "samples": needle_inputs.SAMPLES.value,
    "tasks": needle_inputs.TASKS.value,
    "steps": _STEPS.value,
    "device": device,
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


class _Measured(NamedTuple):
  """What is measured on the prompts of a batch.

  Attributes:
    size: number of prompts.
    cosines: the cosine of neighboring queries of each layer.
    quality_of: the means of each candidate.
  """

  size: int
  cosines: list[float]
  quality_of: list[Quality]


def _measure(
  lm: models.Pretrained, chosen: Sequence[Candidate], samples: results.Samples
) -> tuple[list[Quality], list[float]]:
  """Measures every candidate's means and every layer's cosine."""
  prompts = [
    Prompt.of_sample(lm.text, sample)
    for drawn in samples.values()
    for sample in drawn
  ]
  check_context_length(lm, prompts)
  shape = Shape.of(prompts, run_inputs.batch(), QUERY_AWARE)
  plans = [candidate.plan for candidate in chosen]

  def measure(rows: Sequence[Prompt]) -> Iterator[list[_Measured]]:
    contexts = kvjax.Prompts.of([p.prefilled for p in rows], shape.context)
    qualities, cosines = retrieval_quality.measure(
      lm.model, lm.params, contexts, plans, _STEPS.value
    )
    means = list(map(retrieval_quality.mean, qualities))
    yield [_Measured(len(rows), cosines, means)]

  batches = [
    prompts[start : start + shape.rows]
    for start in range(0, len(prompts), shape.rows)
  ]
  measured: list[_Measured] = []
  with progress_bar.progress_bar(
    len(batches), "measuring", transient=True
  ) as advance:
    for found in multihost.share(batches, measure, _encode, _decode):
      measured += found
      advance("measuring", len(found))
  sizes = [each.size for each in measured]
  of_candidates = zip(*(each.quality_of for each in measured), strict=True)
  of_layers = zip(*(each.cosines for each in measured), strict=True)
  return [_mean(qualities, sizes) for qualities in of_candidates], [
    statistics.fmean(cosines, sizes) for cosines in of_layers
  ]


def _encode(measured: list[_Measured]) -> bytes:
  return json.dumps(measured).encode()


def _decode(payload: bytes) -> list[_Measured]:
  return [
    _Measured(size, cosines, [Quality(*means) for means in quality_of])
    for size, cosines, quality_of in json.loads(payload)
  ]


def _mean(quality_of: Sequence[Quality], sizes: Sequence[int]) -> Quality:
  """Averages over batches of these sizes."""
  values = zip(*quality_of, strict=True)
  return Quality(*(statistics.fmean(each, sizes) for each in values))


if __name__ == "__main__":
  cli.run(main)
