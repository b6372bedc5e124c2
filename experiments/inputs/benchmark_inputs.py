"""Flags for the benchmark, and the samples they select."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, cast

from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.benchmarks import (
  grids,
  hub,
  longbench,
  longbench_files,
  longbench_sets,
  multiturn,
  repetition,
  ruler,
  ruler_files,
)
from kvjax.experiments.inputs import (
  essay_inputs,
  method_inputs,
  run_inputs,
  text_inputs,
)
from kvjax.experiments.metrics import registry
from kvjax.experiments.run import results, runner
from kvjax.experiments.run.answering import (
  FIRST_QUERY_AWARE,
  QUERY_AGNOSTIC,
  Protocol,
)
from kvjax.experiments.tasks import suite
from kvjax.experiments.tasks.sample import OnDraw
from kvjax.models.pretrained import Pretrained

flags.adopt_module_key_flags(text_inputs)

BENCHMARK = flags.DEFINE_enum(
  "benchmark",
  "ruler",
  ["ruler", "longbench", "needle", "passkey", "multiturn"],
  "Benchmark to run.",
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
  "length; the defaults are 20, 3 and 10, and all samples of LongBench.",
  lower_bound=1,
  upper_bound=run_inputs.MOST_SAMPLES,
)
_DEPTHS = flags.DEFINE_integer(
  "depths",
  10,
  "Number of depths of needle and passkey.",
  lower_bound=1,
  upper_bound=1000,
)
_TURNS = flags.DEFINE_integer(
  "turns",
  8,
  "Questions per conversation.",
  lower_bound=1,
  upper_bound=1000,
)
_HISTORY = flags.DEFINE_enum(
  "history",
  "shared",
  multiturn.HISTORIES,
  "What a question of a conversation sees. shared: the compressed context "
  "only; conversation: also the earlier questions and their correct answers; "
  "own: the cache with the earlier questions and the model's own answers, "
  "which --every compresses again in every turn, after question and answer.",
)
_CHAT = flags.DEFINE_enum(
  "chat",
  "always",
  ["always", "official"],
  "Whether prompts have the chat template even if the benchmark's own code "
  "uses none.",
)
_STRICT_OFFICIAL = flags.DEFINE_bool(
  "strict_official",
  False,
  "Scores LongBench with the bugs of its own code, as official tables do; the "
  "default fixes them.",
)
_DATA = flags.DEFINE_string(
  "data",
  None,
  "File or folder with published samples of RULER or LongBench, or the name of "
  "such a dataset on the Hugging Face hub, such as simonjegou/ruler.",
)

_DEFAULT_LENGTH = {
  "ruler": [2048],
  "longbench": [],
  "needle": [1024],
  "passkey": [1024],
  "multiturn": [1024],
}

# Flags that only some benchmarks read.
_OWNERS = {
  "tasks": ("ruler", "longbench"),
  "depths": ("needle", "passkey"),
  "turns": ("multiturn",),
  "history": ("multiturn",),
  "chat": ("longbench", "passkey"),
  "strict_official": ("longbench",),
  "data": ("ruler", "longbench"),
  "essay": ("ruler", "needle", "passkey", "multiturn"),
  "words": ("ruler", "needle", "multiturn"),
  **dict.fromkeys(text_inputs.CORPORA, ("ruler",)),
}


class Drawn(NamedTuple):
  """The samples of a run.

  Attributes:
    samples: samples of each task and length.
    data: sources of their texts, a setting that all answers share.
    notes: one line for each omission.
    about: more facts about the samples for reports.
  """

  samples: results.Samples
  data: Mapping[str, str]
  notes: Sequence[str] = ()
  about: Mapping[str, str] = MappingProxyType({})


def _ruler(lm: Pretrained) -> Drawn:
  if _DATA.value is not None:
    path = hub.resolve(_DATA.value)
    wanted = lengths() if _LENGTH.present else None
    samples = ruler_files.load(path, _TASKS.value, wanted, _SAMPLES.value)
    return Drawn(samples, {"files": results.data_name(path)})
  texts, choice = text_inputs.texts(), _ruler_choice()
  number, seed = _numbers(20)
  with _drawing(len(choice.tasks) * len(lengths()) * number) as on_draw:
    samples = ruler.samples(
      choice.tasks,
      lengths(),
      number,
      seed,
      lm.text.count,
      texts,
      on_draw,
    )
  notes = [
    f"{task} is left out at {length} tokens: it needs more words, by --words."
    for length in lengths()
    for task in choice.tasks
    if (task, length) not in samples
  ]
  missing = ruler.missing(_ruler_tasks(), lengths(), samples)
  about = {"left out": ", ".join(missing)} if missing else {}
  return Drawn(samples, texts.origins, [*choice.notes, *notes], about)


@functools.cache
def _ruler_choice() -> ruler.Choice:
  return ruler.choose(_ruler_tasks(), text_inputs.texts())


def _ruler_tasks() -> Sequence[str]:
  return ruler.TASKS if _TASKS.value is None else _TASKS.value


def _longbench(lm: Pretrained) -> Drawn:
  default = longbench.usual_limit(lm.config.geometry.max_positions)
  (limit,) = lengths() if _LENGTH.present else [default]
  path = hub.resolve(_DATA.value or "")
  available = longbench_files.find(path, longbench_sets.NAMES)
  names = _TASKS.value or [
    name for name in longbench_sets.SETS if name in available
  ]
  with _drawing(None) as on_draw:
    samples = longbench.samples(
      path, names, limit, lm.text, _SAMPLES.value, on_draw
    )
  data = {"files": results.data_name(path)}
  if not _STRICT_OFFICIAL.value:
    return Drawn(samples, data)
  data["metrics"] = longbench.FAULTS_INCLUDED
  return Drawn(longbench.strictly_official(samples), data)


def _needle(lm: Pretrained) -> Drawn:
  texts = essay_inputs.texts()
  draw = functools.partial(
    grids.needle_samples, essay=texts.essay, words=texts.key_words
  )
  return _grid(lm, draw, texts)


def _passkey(lm: Pretrained) -> Drawn:
  texts = essay_inputs.texts()
  draw = functools.partial(grids.passkey_samples, essay=texts.essay)
  return _grid(lm, draw, texts)


def _grid(
  lm: Pretrained, draw: Callable[..., results.Samples], texts: ruler.Texts
) -> Drawn:
  depths = grids.even_depths(_DEPTHS.value)
  number, seed = _numbers(3)
  with _drawing(len(lengths()) * len(depths) * number) as on_draw:
    samples = draw(lengths(), depths, number, seed, lm.text.count, on_draw)
  return Drawn(samples, texts.needle_origins)


def _multiturn(lm: Pretrained) -> Drawn:
  history = cast(multiturn.History, _HISTORY.value)
  number, seed = _numbers(10)
  texts = essay_inputs.texts()
  with _drawing(len(lengths()) * number) as on_draw:
    samples = multiturn.samples(
      lengths(),
      _TURNS.value,
      number,
      seed,
      lm.text,
      history,
      on_draw,
      first_known=protocol() == FIRST_QUERY_AWARE,
      essay=texts.essay,
      words=texts.key_words,
    )
  return Drawn(samples, texts.needle_origins)


_DRAW: dict[str, Callable[[Pretrained], Drawn]] = {
  "ruler": _ruler,
  "longbench": _longbench,
  "needle": _needle,
  "passkey": _passkey,
  "multiturn": _multiturn,
}


def _drawing(
  total: int | None,
) -> contextlib.AbstractContextManager[OnDraw]:
  """Shows a progress bar that disappears when all samples are drawn."""
  return runner.progress_bar(total, "drawing", transient=True)


def _numbers(samples: int) -> tuple[int, int]:
  """Returns the number of samples, by default this one, and the seed."""
  return _SAMPLES.value or samples, run_inputs.SEED.value


def protocol() -> Protocol:
  """Returns whether the question is known before compression."""
  chosen = method_inputs.protocol()
  if BENCHMARK.value == "multiturn" and chosen != QUERY_AGNOSTIC:
    return FIRST_QUERY_AWARE
  return chosen


def check_flags() -> None:
  """Rejects flags that do not suit the benchmark.

  Raises:
    InputError: a flag belongs to another benchmark, a length is no integer, a
      task does not exist, or the first question is prefilled but the others do
      not see it.
  """
  lengths()
  benchmark = BENCHMARK.value
  for flag, owners in _OWNERS.items():
    if flags.FLAGS[flag].present and benchmark not in owners:
      raise InputError(
        f"--{flag} belongs to --benchmark={', '.join(owners[:-1])}"
        f"{' and ' if owners[1:] else ''}{owners[-1]}, not to {benchmark}."
      )
  if flags.FLAGS["data"].present and benchmark == "ruler":
    cli.refuse_together(
      "data", text_inputs.NAMES, "they are for samples that are made here"
    )
  if _TASKS.value is not None:
    known = {"ruler": ruler.TASKS, "longbench": longbench_sets.NAMES}
    suite.check_tasks(_TASKS.value, known[benchmark])
  if benchmark == "ruler" and _DATA.value is None:
    _ruler_choice()
  if benchmark in ("needle", "passkey", "multiturn"):
    essay_inputs.texts()
  if benchmark == "longbench":
    _check_longbench()
  if protocol() == FIRST_QUERY_AWARE and _HISTORY.value == "shared":
    raise InputError(
      f"With --protocol={method_inputs.protocol()} a conversation's context "
      "ends with its "
      "first question, which the others follow; choose --history=conversation "
      "or own."
    )


def _check_longbench() -> None:
  if _DATA.value is None:
    raise InputError(
      "LongBench is read from disk; give its folder or data.zip by --data, or "
      "its name on the Hugging Face hub."
    )
  if len(lengths()) > 1:
    raise InputError("--length takes one limit for LongBench, such as 7500.")


def lengths() -> list[int]:
  """Parses --length; empty for LongBench's default.

  Raises:
    InputError: a value is not a positive integer.
  """
  if _LENGTH.value is None:
    return _DEFAULT_LENGTH[BENCHMARK.value]
  return run_inputs.parse_lengths(_LENGTH.value)


def draw(lm: Pretrained) -> Drawn:
  """Draws the samples that the flags select.

  Raises:
    InputError: a length is too short for a task or longer than the model's
      context, a task does not exist, or a file cannot be read.
  """
  if _DATA.value is None:
    run_inputs.check_lengths(lm, lengths())
  drawn = _DRAW[BENCHMARK.value](lm)
  registry.check({s.metric for part in drawn.samples.values() for s in part})
  found = repetition.of(drawn.samples)
  drawn = drawn._replace(
    notes=[*drawn.notes, *found.notes], about={**drawn.about, **found.about}
  )
  if BENCHMARK.value not in _OWNERS["chat"]:
    return drawn
  samples = drawn.samples
  if _CHAT.value == "always":
    samples = {
      part: [dataclasses.replace(sample, chat=True) for sample in drawn_samples]
      for part, drawn_samples in samples.items()
    }
  if BENCHMARK.value == "longbench":
    drawn = drawn._replace(about=longbench.provenance(samples))
  data = {**drawn.data, "chat template": _CHAT.value}
  return drawn._replace(samples=samples, data=data)
