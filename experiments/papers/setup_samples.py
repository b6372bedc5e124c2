"""The samples of an experiment's setup."""

import dataclasses
import pathlib
import sys

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.base import (
  ALWAYS,
  CHAT,
  OFFICIAL,
  Drawn,
  Request,
)
from kvjax.experiments.benchmarks.longbench import finder, reader, sets
from kvjax.experiments.benchmarks.math.definition import NEW_TOKENS
from kvjax.experiments.benchmarks.multiturn.definition import HISTORY
from kvjax.experiments.benchmarks.needle.definition import DEPTHS
from kvjax.experiments.benchmarks.registry import BENCHMARKS
from kvjax.experiments.benchmarks.ruler import generator
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.papers.data_model import Setup
from kvjax.experiments.papers.findings import Scale
from kvjax.experiments.run.digests import data_name
from kvjax.experiments.run.prompting import QUERY_AWARE, Prompt, Protocol
from kvjax.experiments.run.results import Samples
from kvjax.models.pretrained import Pretrained


@dataclasses.dataclass(frozen=True)
class Sources:
  """The user's data.

  Attributes:
    data: files of LongBench, RULER or MATH-500.
    texts: texts of RULER's tasks.
  """

  data: pathlib.Path | None = None
  texts: generator.Texts = dataclasses.field(
    default_factory=generator.Texts.read
  )


def draw(
  setup: Setup,
  scale: Scale,
  lm: Pretrained,
  sources: Sources,
  seed: int,
  protocol: Protocol = QUERY_AWARE,
) -> Drawn:
  """Draws the samples of a setup.

  At the small scale every prompt has the chat template, which the bundled model
  needs. Otherwise each benchmark's own rule applies, and always that of
  mathematical problems. LongBench is scored as by its own code; if questions
  are prefilled, prompts have its order as well.

  Raises:
    InputError: a length is too short for a task or longer than the model's
      context, or a file cannot be read.
  """
  if setup.lengths:
    run_inputs.check_lengths(lm, setup.lengths)
  if setup.benchmark == "longbench":
    drawn = _longbench(setup, lm, sources, protocol)
  else:
    drawn = _generated(setup, scale, lm, sources, seed)
  drawn = drawn.checked()
  if setup.new_tokens is not None:
    return drawn
  if scale == "paper":
    return drawn._replace(data={**drawn.data, "chat template": "official"})
  return drawn.in_chat()


def prompts(
  setup: Setup, scale: Scale, lm: Pretrained, sources: Sources, seed: int
) -> dict[str, list[list[int]]]:
  """Encodes the prompts of a setup with their questions, by task."""
  by_task: dict[str, list[list[int]]] = {}
  if not setup.tasks:
    return by_task
  for part, drawn in draw(setup, scale, lm, sources, seed).samples.items():
    rows = [Prompt.of_sample(lm.text, s).prefilled for s in drawn]
    by_task.setdefault(part.task, []).extend(rows)
  return by_task


def _generated(
  setup: Setup, scale: Scale, lm: Pretrained, sources: Sources, seed: int
) -> Drawn:
  request = Request(
    seed,
    tasks=setup.tasks,
    lengths=setup.lengths,
    samples=setup.samples,
    data=None if sources.data is None else str(sources.data),
    texts=lambda: sources.texts,
    options={
      DEPTHS.name: setup.depths,
      CHAT.name: OFFICIAL if scale == "paper" else ALWAYS,
      HISTORY.name: "conversation",
      NEW_TOKENS.name: setup.new_tokens,
    },
  )
  return BENCHMARKS[setup.benchmark].draw(lm, request)


def _longbench(
  setup: Setup, lm: Pretrained, sources: Sources, protocol: Protocol
) -> Drawn:
  """Draws the available datasets of LongBench.

  Raises:
    InputError: none is available, or see `reader.samples`.
  """
  path = sources.data
  assert path is not None
  available = finder.find(path, sets.NAMES)
  chosen = [name for name in setup.tasks if name in available]
  if not chosen:
    raise InputError(
      f"{path} has no {' or '.join(setup.tasks)}; it holds "
      f"{', '.join(available)}."
    )
  limit = setup.lengths[0] if setup.lengths else sys.maxsize
  drawn: Samples = reader.samples(path, chosen, limit, lm.text, setup.samples)
  missing = [name for name in setup.tasks if name not in chosen]
  notes = [f"{path} has no {', '.join(missing)}; left out."] if missing else []
  about = reader.provenance(drawn)
  data = {"files": data_name(path), "metrics": reader.FAULTS_INCLUDED}
  drawn = reader.strictly_official(drawn)
  if protocol == QUERY_AWARE:
    data["start of the answer"] = "in the user's turn"
    drawn = reader.officially_ordered(drawn)
  return Drawn(drawn, data, notes, about)
