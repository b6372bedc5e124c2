"""Flags for documents that a model is to read."""

import pathlib

from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import refusals
from kvjax.experiments.benchmarks import hub
from kvjax.experiments.benchmarks.longbench import sets
from kvjax.experiments.finetuning import documents
from kvjax.experiments.tasks import suite

_DOCUMENTS = flags.DEFINE_string(
  "documents", None, "Folder of .txt and .md files to read."
)
_DATA = flags.DEFINE_string(
  "data",
  None,
  "File or folder with LongBench, or its name on the Hugging Face hub, whose "
  "contexts are the documents.",
)
_TASKS = flags.DEFINE_list(
  "tasks", list(sets.SETS), "Datasets of LongBench, for --data."
)


def read(samples: int | None = None) -> list[str]:
  """Reads the documents.

  Args:
    samples: documents per dataset of LongBench; None for all.

  Raises:
    InputError: no documents are named, or they cannot be read.
  """
  refusals.refuse_together("documents", ["data"], "both are what is read")
  refusals.refuse_together("documents", ["tasks"], "tasks are those of --data")
  if _DATA.value is not None:
    suite.check_tasks(_TASKS.value, sets.NAMES)
    path = hub.resolve(_DATA.value)
    return documents.read_longbench(path, _TASKS.value, samples)
  if _DOCUMENTS.value is None:
    raise InputError(
      "Name a folder of .txt and .md files to read: --documents=DIR."
    )
  return documents.read(pathlib.Path(_DOCUMENTS.value))
