"""LongBench (Bai et al., 2024; THUDM/LongBench): samples from a user's files.

Prompts, budgets and truncation are official, and so are metrics, except for
three bugs of `metrics.py`; see `strictly_official`.
"""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Sequence

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.longbench import finder, templates
from kvjax.experiments.benchmarks.longbench.sets import BUCKETS, NAMES, SETS
from kvjax.experiments.benchmarks.longbench.templates import PromptTexts
from kvjax.experiments.benchmarks.row_files import RowFile
from kvjax.experiments.benchmarks.rows import Row
from kvjax.experiments.metrics import registry
from kvjax.experiments.run.results import Part, Samples
from kvjax.experiments.tasks import suite
from kvjax.experiments.tasks.sample import OnDraw, Sample, ignore
from kvjax.models.tokenizer import Tokenizer

# The metrics of `strictly_official` in words.
FAULTS_INCLUDED = "LongBench's own code, faults included"

# The tokens reserved for the longest answers, and the step of limits.
_ANSWER, _STEP = 512, 500


def usual_limit(context: int) -> int:
  """Computes LongBench's usual prompt limit for a context length.

  LongBench's code truncates to 3,500 of 4,096 and 7,500 of 8,192 tokens,
  without answer and template.
  """
  return (context - _ANSWER) // _STEP * _STEP


def samples(
  path: pathlib.Path,
  names: Sequence[str],
  limit: int,
  tokenizer: Tokenizer,
  count: int | None = None,
  on_draw: OnDraw = ignore,
) -> dict[Part, list[Sample]]:
  """Reads the first samples of datasets, from files in any published layout.

  Rows with prompts by kvpress follow kvpress: with its budgets, 20 tokens more
  than the official ones, and the chat template for every dataset. All other
  rows follow the official code.

  Args:
    path: a file or folder; see `finder.find`.
    names: datasets, of `NAMES`.
    limit: maximum tokens of prompts, before the chat template; usually 3500,
      7500 and 31500 for models of 4K, 8K and 32K.
    tokenizer: the model's tokenizer.
    count: samples per part, if not all.
    on_draw: called for every sample.

  Returns:
    A part per dataset with its name; for LongBench-E, a part per nonempty
    bucket of lengths, such as `qasper_e_0-4k`.

  Raises:
    InputError: a name is no dataset, see `finder.find`, a dataset is
      missing, a file is malformed, or the limit is too short.
  """
  suite.check_tasks(names, NAMES)
  files = finder.find(path, NAMES)
  missing = [name for name in names if name not in files]
  if missing:
    raise InputError(
      f"{path} has no {', '.join(missing)}; it holds {', '.join(files)}."
    )
  most = sys.maxsize if count is None else count
  drawn: dict[Part, list[Sample]] = {}
  for name in names:
    drawn |= _parts(name, files[name], limit, tokenizer, most, on_draw)
  return drawn


def strictly_official(drawn: Samples) -> Samples:
  """Switches samples to metrics with the bugs of LongBench's own code.

  They reproduce the official tables: ROUGE is 0 for long texts without a full
  stop and may exceed 0 for a blank, and not all class names contained in the
  correct one are dropped.
  """
  return {
    part: [
      dataclasses.replace(
        sample, metric=registry.OFFICIAL.get(sample.metric, sample.metric)
      )
      for sample in part_samples
    ]
    for part, part_samples in drawn.items()
  }


def officially_ordered(drawn: Samples) -> Samples:
  """Moves starts of answers into the user's turn, as LongBench's code does.

  There, the chat template encloses the full prompt. Otherwise the start of the
  answer follows the template, as in kvpress, whose prompts stay as they are.
  The question must be prefilled with the context.
  """
  return {
    part: [
      dataclasses.replace(
        sample,
        question=sample.question + sample.answer_prefix,
        answer_prefix="",
      )
      if sample.metadata["layout"] == "official"
      else sample
      for sample in part_samples
    ]
    for part, part_samples in drawn.items()
  }


def provenance(drawn: Samples) -> dict[str, str]:
  """Describes the samples of `samples` for reports."""
  each = [sample for part in drawn.values() for sample in part]
  kvpress = sum(sample.metadata["layout"] == "kvpress" for sample in each)
  cut = sum(sample.metadata["truncated"] for sample in each)
  plain = sorted({sample.task for sample in each if not sample.chat})
  facts = {
    "prompts": f"{len(each) - kvpress} official, {kvpress} of kvpress",
    "truncated": f"{cut} of {len(each)} prompts, in the middle",
    "no chat template": ", ".join(plain),
  }
  return {name: text for name, text in facts.items() if text}


def _parts(
  name: str,
  files: Sequence[RowFile],
  limit: int,
  tokenizer: Tokenizer,
  most: int,
  on_draw: OnDraw,
) -> dict[Part, list[Sample]]:
  """A set's parts with so many samples each; what follows is not read."""
  parts = {Part(task, limit): list[Sample]() for task in _tasks(name)}
  for row in itertools.chain.from_iterable(file.rows() for file in files):
    drawn = parts[Part(_task(name, row), limit)]
    if len(drawn) < most:
      drawn.append(_sample(name, row, limit, tokenizer))
      on_draw(name, 1)
      if all(len(each) == most for each in parts.values()):
        break
  if not any(parts.values()):
    raise InputError(f"{files[0]} has no rows.")
  return {part: drawn for part, drawn in parts.items() if drawn}


def _tasks(name: str) -> list[str]:
  """The parts that a set comes in."""
  if name in SETS:
    return [name]
  return [f"{name}_{bucket}" for bucket in BUCKETS]


def _task(name: str, row: Row) -> str:
  if name in SETS:
    return name
  words = row.number("length")
  return _tasks(name)[(words >= 4000) + (words >= 8000)]


def _sample(name: str, row: Row, limit: int, tokenizer: Tokenizer) -> Sample:
  base = name.removesuffix("_e")
  data_set = SETS[base]
  kvpress = "question" in row.fields
  if kvpress:
    full_prompt = PromptTexts(
      *(row.text(field) for field in PromptTexts._fields)
    )
    budget = row.number("max_new_tokens", 1)
  else:
    full_prompt = templates.fill(base, row.text("context"), row.text("input"))
    budget = data_set.max_new_tokens
  prompt = templates.truncate(full_prompt, limit, tokenizer)
  metadata = {
    "layout": "kvpress" if kvpress else "official",
    "truncated": prompt != full_prompt,
    "language": data_set.language,
    "words": row.fields.get("length"),
    "first_line": data_set.first_line,
  }
  scored_by: tuple[str, ...] = ("words",)
  if data_set.metric == "classification":
    metadata["all_classes"] = row.texts("all_classes")
    scored_by += ("all_classes",)
  return Sample(
    *prompt,
    answers=row.texts("answers"),
    task=_task(name, row),
    max_new_tokens=budget,
    metadata=metadata,
    metric=data_set.metric,
    scored_by=scored_by,
    chat=kvpress or not data_set.examples,
  )
