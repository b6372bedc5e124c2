"""The samples of an experiment's setup."""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvjax.errors import InputError
from kvjax.experiments import inputs
from kvjax.experiments.answering import Prompt
from kvjax.experiments.benchmarks import (
  grids,
  longbench,
  longbench_files,
  longbench_sets,
  multiturn,
  ruler,
  ruler_files,
)
from kvjax.experiments.metrics import registry
from kvjax.experiments.paper_experiments.findings import Scale
from kvjax.experiments.paper_experiments.records import Setup
from kvjax.experiments.results import Samples, data_name
from kvjax.experiments.tasks import prose
from kvjax.models.pretrained import Pretrained

_TURNS = 8


@dataclasses.dataclass(frozen=True)
class Sources:
  """What the user has.

  Attributes:
    data: files of LongBench or RULER.
    texts: what RULER's tasks are made of.
  """

  data: pathlib.Path | None = None
  texts: ruler.Texts = dataclasses.field(default_factory=ruler.Texts.read)


class Drawn(NamedTuple):
  """What is asked.

  Attributes:
    samples: of each task and length.
    data: where their texts come from.
    notes: a line each about what is left out.
    about: what else a report says about them.
  """

  samples: Samples
  data: Mapping[str, str]
  notes: Sequence[str] = ()
  about: Mapping[str, str] = {}


def draw(
  setup: Setup, scale: Scale, lm: Pretrained, sources: Sources, seed: int
) -> Drawn:
  """The samples that a setup names.

  At the small scale every prompt has the chat template around it, which is
  what the bundled model knows; else each benchmark's own rule holds.

  Raises:
    InputError: a length is too short for a task or longer than the model's
      context, or a file cannot be read.
  """
  if setup.lengths:
    inputs.check_lengths(lm, setup.lengths)
  drawn = _draw(setup, lm, sources, seed)
  registry.check({s.metric for part in drawn.samples.values() for s in part})
  if scale == "paper":
    return drawn._replace(data={**drawn.data, "chat template": "official"})
  return drawn._replace(
    samples={
      part: [dataclasses.replace(sample, chat=True) for sample in samples]
      for part, samples in drawn.samples.items()
    }
  )


def prompts(
  setup: Setup, scale: Scale, lm: Pretrained, sources: Sources, seed: int
) -> dict[str, list[list[int]]]:
  """Tokens of a setup's prompts with their questions, by task."""
  found: dict[str, list[list[int]]] = {}
  if not setup.tasks:
    return found
  for part, drawn in draw(setup, scale, lm, sources, seed).samples.items():
    rows = [Prompt.of_sample(lm.text, s).prefilled for s in drawn]
    found.setdefault(part.task, []).extend(rows)
  return found


def _draw(setup: Setup, lm: Pretrained, sources: Sources, seed: int) -> Drawn:
  lengths, count = list(setup.lengths), lm.text.count
  number = setup.samples or 0
  match setup.benchmark:
    case "longbench":
      return _longbench(setup, lm, sources)
    case "ruler":
      return _ruler(setup, lm, sources, seed)
    case "multiturn":
      found = multiturn.samples(
        lengths, _TURNS, number, seed, lm.text, "conversation"
      )
    case "needle" | "passkey":
      draw = {
        "needle": grids.needle_samples,
        "passkey": grids.passkey_samples,
      }[setup.benchmark]
      depths = grids.even_depths(setup.depths)
      found = draw(lengths, depths, number, seed, count)
  return Drawn(found, {"essay": prose.SOURCE})


def _longbench(setup: Setup, lm: Pretrained, sources: Sources) -> Drawn:
  """The sets that there are.

  Raises:
    InputError: there is none, or see `longbench.samples`.
  """
  path = sources.data
  assert path is not None
  valid = longbench_files.find(path, longbench_sets.NAMES)
  there = [name for name in setup.tasks if name in valid]
  if not there:
    raise InputError(
      f"{path} has no {' or '.join(setup.tasks)}; it holds {', '.join(valid)}."
    )
  limit = setup.lengths[0] if setup.lengths else sys.maxsize
  drawn = longbench.samples(path, there, limit, lm.text, setup.samples)
  missing = [name for name in setup.tasks if name not in there]
  notes = [f"{path} has no {', '.join(missing)}; left out."] if missing else []
  about = longbench.provenance(drawn)
  return Drawn(drawn, {"files": data_name(path)}, notes, about)


def _ruler(setup: Setup, lm: Pretrained, sources: Sources, seed: int) -> Drawn:
  if sources.data is not None:
    drawn = ruler_files.load(
      sources.data, list(setup.tasks), list(setup.lengths), setup.samples
    )
    return Drawn(drawn, {"files": data_name(sources.data)})
  choice = ruler.choose(setup.tasks, sources.texts)
  made = ruler.samples(
    choice.tasks,
    setup.lengths,
    setup.samples or 0,
    seed,
    lm.text.count,
    sources.texts,
  )
  return Drawn(made, choice.data, choice.notes)
