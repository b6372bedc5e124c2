"""Reads published RULER samples from files.

Three layouts (`<len>` is a folder named after the length, such as 4096):

- `<len>/test-*.parquet` of the hub's `simonjegou/ruler` (kvpress), or saved by
  `save_to_disk`: context, question and answer prefix in columns.
- `<len>/<task>/validation.jsonl` of RULER's own scripts: a prompt under
  `input`, its references under `outputs`; newer ones have a separate answer
  prefix.
- `<len>/<task>.jsonl`, the same in the bundles of KVCache-Factory and FastKV;
  both may also be `.json`.

All may be in a zip, JSON lines may be compressed by gzip, and rows may be CSV
whose lists are printed as by Python.

Prompts are split as in kvpress
(`evaluation/benchmarks/ruler/create_huggingface_dataset.py`).
"""

import pathlib
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.row_files import RowFile, find
from kvjax.experiments.benchmarks.rows import Row, printed_list
from kvjax.experiments.benchmarks.ruler.generator import TASKS
from kvjax.experiments.run.results import Part
from kvjax.experiments.tasks import (
  common_words,
  frequent_words,
  question_answering,
  variable_tracking,
)
from kvjax.experiments.tasks.sample import Sample


class _Family(NamedTuple):
  """Splitting and scoring of one kind of tasks.

  Attributes:
    question: pattern of the start of the question; an example's question may
      precede it.
    max_new_tokens: maximum tokens of the answer.
    prefix: start of the answer prefix.
    metric: name of the metric.
  """

  question: str
  max_new_tokens: int
  prefix: str = "Answer:"
  metric: str = "string_match_all"


# By the first part of a task's name.
_FAMILIES = {
  "niah": _Family(
    "What (?:is|are all) the special magic", 128, "The special magic"
  ),
  "vt": _Family(
    "Question: Find all variables", variable_tracking.MAX_NEW_TOKENS
  ),
  "cwe": _Family(
    "Question: What are the 10 most common", common_words.MAX_NEW_TOKENS
  ),
  "fwe": _Family("Question: Do not provide", frequent_words.MAX_NEW_TOKENS),
  "qa": _Family(
    "Answer the question based on the given documents",
    question_answering.MAX_NEW_TOKENS,
    metric="string_match_part",
  ),
}
# A file with the name of a split belongs to the task of its folder.
_SPLITS = ("validation", "test")
# Parent folders to search for the length, as in 4096/vt/validation.jsonl.
_NEXT = 3
# Folders of answers next to RULER's samples.
_ANSWERS = "pred"


def load(
  path: pathlib.Path,
  tasks: Sequence[str] | None = None,
  lengths: Sequence[int] | None = None,
  number: int | None = None,
) -> dict[Part, list[Sample]]:
  """Loads the samples of a file or folder, in the order of their rows.

  Args:
    path: a file, or a folder or zip to search.
    tasks: tasks to read; the default is all.
    lengths: lengths to read; the default is all.
    number: maximum samples per task and length; the default is all.

  Returns:
    The samples, the shortest length first and tasks in RULER's order.

  Raises:
    InputError: a file cannot be read or is malformed, or requested samples are
      missing.
  """
  by_part: dict[Part, list[Sample]] = {}
  places: dict[Part, str] = {}
  for file in _files(path):
    length = _length(path, file)
    if lengths is not None and length not in lengths:
      continue
    place = str(file if file.is_text else (file.path / file.member).parent)
    for row in file.rows():
      part = Part(_task(row, file), length)
      wanted = tasks is None or part.task in tasks
      if wanted and places.setdefault(part, place) != place:
        raise InputError(
          f"{path} holds {part.task} of {length} tokens twice, in "
          f"{places[part]} and {place}; give the one to read."
        )
      if wanted and len(by_part.get(part, ())) != number:
        by_part.setdefault(part, []).append(_sample(row, part))
      elif "task" not in row.fields:
        break  # The rest of the file has the same task.
  _check_complete(path, by_part, tasks, lengths)
  return {part: by_part[part] for part in sorted(by_part, key=_order)}


def _files(path: pathlib.Path) -> list[RowFile]:
  files = [
    file
    for file in find(path)
    if _ANSWERS not in file.below(path).parts
    and (file.kind != ".json" or file == RowFile(path) or _named(file))
  ]
  if not files:
    raise InputError(
      f"{path} holds no samples of RULER; give a folder with files such as "
      "4096/test-00000-of-00001.parquet or 4096/vt/validation.jsonl."
    )
  return files


def _named(file: RowFile) -> bool:
  """Whether it is called as files of samples are: others may be anything."""
  return file.stem in (*TASKS, *_SPLITS)


def _length(path: pathlib.Path, file: RowFile) -> int:
  """Returns the length from the nearest folder with a number as name.

  Only the closest parents of the user's path are searched.
  """
  given = path.with_suffix("") if path.suffix == ".zip" else path
  outer = given.absolute().parts[-_NEXT:]
  for name in reversed([*outer, *file.below(path).parts]):
    if name.isdecimal():
      return int(name)
  raise InputError(
    f"{file} stands in no folder that is named after its samples' length in "
    "tokens; move it into one, such as 4096."
  )


def _task(row: Row, file: RowFile) -> str:
  if "task" in row.fields:
    task = row.text("task")
  else:
    task = file.name.parent.name if file.stem in _SPLITS else file.stem
    if task.split("_")[0] not in _FAMILIES:
      raise InputError(
        f"{row.place} lacks 'task', and neither its file nor its folder is "
        "named after a task of RULER, as in vt.jsonl and vt/validation.jsonl."
      )
  if task.split("_")[0] not in _FAMILIES:
    raise InputError(
      f"{row.place} is of {task!r}, which is no task of RULER; those are "
      f"{', '.join(TASKS)}."
    )
  return task


def _sample(row: Row, part: Part) -> Sample:
  family = _FAMILIES[part.task.split("_")[0]]
  if "input" in row.fields:
    context, question, prefix = _split(row, family)
    max_new_tokens = family.max_new_tokens
  else:
    context, question = row.text("context"), row.text("question")
    prefix = row.text("answer_prefix")
    max_new_tokens = row.number("max_new_tokens", 1)
  return Sample(
    context=context,
    question=question,
    answer_prefix=prefix,
    answers=_answers(row),
    task=part.task,
    max_new_tokens=max_new_tokens,
    metadata={"length": part.length},
    metric=family.metric,
  )


def _split(row: Row, family: _Family) -> tuple[str, str, str]:
  """Splits a prompt into context, question and answer prefix.

  The blank before a prefix inside the prompt stays with the question, as in
  kvpress.
  """
  text = row.text("input")
  starts = [match.start() for match in re.finditer(family.question, text)]
  if not starts:
    raise InputError(f"{row.place} holds under 'input' no {family.question!r}.")
  context, question = text[: starts[-1]], text[starts[-1] :]
  if "answer_prefix" in row.fields:
    return context, question, row.text("answer_prefix")
  place = question.find(family.prefix)
  if place < 0:
    raise InputError(
      f"{row.place} holds neither 'answer_prefix' nor, at the end of 'input', "
      f"{family.prefix!r}."
    )
  return context, question[:place], question[place:]


def _answers(row: Row) -> tuple[str, ...]:
  """Returns references, also from lists that are printed as text."""
  names = ("answer", "answers", "outputs")
  name = next((name for name in names if name in row.fields), "outputs")
  answers = row.texts(name)
  if len(answers) == 1:
    items = printed_list(answers[0])
    answers = answers if items is None else items
  # Every text holds an empty one, so that it would score 100.
  if not answers or not all(answer.strip() for answer in answers):
    raise InputError(f"{row.place} has no answer under {name!r}.")
  return answers


def _check_complete(
  path: pathlib.Path,
  by_part: Collection[Part],
  tasks: Sequence[str] | None,
  lengths: Sequence[int] | None,
) -> None:
  wanted = {
    Part(task, length)
    for task in tasks or {part.task for part in by_part}
    for length in lengths or {part.length for part in by_part}
  }
  missing = sorted(wanted.difference(by_part), key=_order)
  if missing or not by_part:
    lack = ", ".join(map(_describe, missing)) or "samples"
    has = ", ".join(map(_describe, sorted(by_part, key=_order))) or "none"
    raise InputError(
      f"{path} holds no {lack}; of those asked for it has {has}."
    )


def _describe(part: Part) -> str:
  return f"{part.task} of {part.length} tokens"


def _order(part: Part) -> tuple[int, int, str]:
  known = TASKS.index(part.task) if part.task in TASKS else len(TASKS)
  return part.length, known, part.task
