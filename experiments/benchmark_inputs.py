"""Flags that say which benchmark is asked, and the samples they name."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, cast

from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import (
  cli,
  inputs,
  method_inputs,
  results,
  runs,
  suite,
  text_inputs,
)
from kvjax.experiments.answering import FIRST_QUERY_AWARE, QUERY_AWARE, Protocol
from kvjax.experiments.benchmarks import (
  grids,
  hub,
  longbench,
  longbench_files,
  longbench_sets,
  multiturn,
  ruler,
  ruler_files,
)
from kvjax.experiments.metrics import registry
from kvjax.experiments.tasks import prose
from kvjax.experiments.tasks.sample import OnDraw
from kvjax.models.pretrained import Pretrained

flags.adopt_module_key_flags(text_inputs)

BENCHMARK = flags.DEFINE_enum(
  "benchmark",
  "ruler",
  ["ruler", "longbench", "needle", "passkey", "multiturn"],
  "What is asked.",
)
_TASKS = flags.DEFINE_list(
  "tasks", None, "Tasks of RULER or sets of LongBench; by default all."
)
_LENGTH = flags.DEFINE_list(
  "length",
  None,
  "Tokens of prompt and answer, chat template aside; by default 2,048 for "
  "RULER and 1,024 for what else is made here. Of LongBench's prompts the "
  "most, the middle being cut out; by default what the context has room for.",
)
_SAMPLES = flags.DEFINE_integer(
  "samples",
  None,
  "Samples per task and length, or per length and depth, or conversations per "
  "length; by default 20, 3 and 10, and all of LongBench.",
  lower_bound=1,
)
_DEPTHS = flags.DEFINE_integer(
  "depths", 10, "Depths of needle and passkey.", lower_bound=1
)
_TURNS = flags.DEFINE_integer(
  "turns", 8, "Questions of a conversation.", lower_bound=1
)
_HISTORY = flags.DEFINE_enum(
  "history",
  "shared",
  multiturn.HISTORIES,
  "What a question of a conversation sees: the cache as the context left it, "
  "the earlier questions and their right answers as well, or a cache that "
  "holds them and the model's own answers. This is compressed again in every "
  "turn, after the question and after the answer, where --every says so.",
)
_CHAT = flags.DEFINE_enum(
  "chat",
  "always",
  ["always", "official"],
  "Whether prompts that a benchmark's own code asks without the chat template "
  "have it too.",
)
_STRICT_OFFICIAL = flags.DEFINE_bool(
  "strict_official",
  False,
  "Scores LongBench with the faults of its own code, as official tables do; "
  "by default they are mended.",
)
_DATA = flags.DEFINE_string(
  "data",
  None,
  "File or folder of published samples of RULER or LongBench, or the name of "
  "such a data set of the Hugging Face hub, as simonjegou/ruler.",
)

_DEFAULT_LENGTH = {
  "ruler": [2048],
  "longbench": [],
  "needle": [1024],
  "passkey": [1024],
  "multiturn": [1024],
}

# Flags that not every benchmark reads.
_OWNERS = {
  "tasks": ("ruler", "longbench"),
  "depths": ("needle", "passkey"),
  "turns": ("multiturn",),
  "history": ("multiturn",),
  "chat": ("longbench", "passkey"),
  "strict_official": ("longbench",),
  "data": ("ruler", "longbench"),
  **dict.fromkeys(text_inputs.NAMES, ("ruler",)),
}


class Drawn(NamedTuple):
  """What is asked.

  Attributes:
    samples: of each task and length.
    data: where their texts come from, as all answers of a run share it.
    notes: a line each about what is left out.
    about: what else a report says about the samples.
  """

  samples: results.Samples
  data: Mapping[str, str]
  notes: Sequence[str] = ()
  about: Mapping[str, str] = MappingProxyType({})


def _ruler(lm: Pretrained) -> Drawn:
  if _DATA.value is not None:
    path = hub.resolved(_DATA.value)
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
  room = longbench.usual_limit(lm.config.geometry.max_positions)
  (limit,) = lengths() if _LENGTH.present else [room]
  path = hub.resolved(_DATA.value or "")
  there = longbench_files.find(path, longbench_sets.NAMES)
  names = _TASKS.value or [
    name for name in longbench_sets.SETS if name in there
  ]
  with _drawing(None) as on_draw:
    samples = longbench.samples(
      path, names, limit, lm.text, _SAMPLES.value, on_draw
    )
  data = {"files": results.data_name(path)}
  if not _STRICT_OFFICIAL.value:
    return Drawn(samples, data)
  data["metrics"] = "LongBench's own code, faults included"
  return Drawn(longbench.strictly_official(samples), data)


def _needle(lm: Pretrained) -> Drawn:
  return _grid(lm, grids.needle_samples)


def _passkey(lm: Pretrained) -> Drawn:
  return _grid(lm, grids.passkey_samples)


def _grid(lm: Pretrained, draw: Callable[..., results.Samples]) -> Drawn:
  depths = grids.even_depths(_DEPTHS.value)
  number, seed = _numbers(3)
  with _drawing(len(lengths()) * len(depths) * number) as on_draw:
    samples = draw(lengths(), depths, number, seed, lm.text.count, on_draw)
  return Drawn(samples, {"essay": prose.SOURCE})


def _multiturn(lm: Pretrained) -> Drawn:
  history = cast(multiturn.History, _HISTORY.value)
  number, seed = _numbers(10)
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
    )
  return Drawn(samples, {"essay": prose.SOURCE})


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
  """A bar that goes when all samples are there."""
  return runs.progress_bar(total, "drawing", transient=True)


def _numbers(samples: int) -> tuple[int, int]:
  """Samples, so many by default, and their seed."""
  return _SAMPLES.value or samples, inputs.SEED.value


def protocol() -> Protocol:
  """What is known when the context is compressed."""
  own = method_inputs.protocol()
  if BENCHMARK.value == "multiturn" and own == QUERY_AWARE:
    return FIRST_QUERY_AWARE
  return own


def check_flags() -> None:
  """Refuses flags that do not suit the benchmark.

  Raises:
    InputError: a flag is not of this benchmark, a length is no whole number, a
      task does not exist, or a first question is to be known that others do
      not follow.
  """
  lengths()
  benchmark = BENCHMARK.value
  for flag, owners in _OWNERS.items():
    if flags.FLAGS[flag].present and benchmark not in owners:
      raise InputError(
        f"--{flag} belongs to --benchmark={' and '.join(owners)}, not to "
        f"{benchmark}."
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
  if benchmark == "longbench":
    _check_longbench()
  if protocol() == FIRST_QUERY_AWARE and _HISTORY.value == "shared":
    raise InputError(
      f"With --protocol={QUERY_AWARE} a conversation's context ends with its "
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
  """What --length asks for; nothing for LongBench's default.

  Raises:
    InputError: it holds something else than whole numbers above 0.
  """
  if _LENGTH.value is None:
    return _DEFAULT_LENGTH[BENCHMARK.value]
  texts = dict.fromkeys(text.strip() for text in _LENGTH.value)
  if not texts or not all(text.isdecimal() and int(text) for text in texts):
    raise InputError(
      f"--length takes numbers of tokens such as 1024,2048; "
      f"{','.join(_LENGTH.value)!r} is not."
    )
  return [int(text) for text in texts]


def draw(lm: Pretrained) -> Drawn:
  """The samples that the flags name.

  Raises:
    InputError: a length is too short for a task or longer than the model's
      context, a task does not exist, or a file cannot be read.
  """
  if _DATA.value is None:
    inputs.check_lengths(lm, lengths())
  drawn = _DRAW[BENCHMARK.value](lm)
  registry.check({s.metric for part in drawn.samples.values() for s in part})
  if BENCHMARK.value not in _OWNERS["chat"]:
    return drawn
  samples = drawn.samples
  if _CHAT.value == "always":
    samples = {
      part: [dataclasses.replace(sample, chat=True) for sample in own]
      for part, own in samples.items()
    }
  if BENCHMARK.value == "longbench":
    drawn = drawn._replace(about=longbench.provenance(samples))
  data = {**drawn.data, "chat template": _CHAT.value}
  return drawn._replace(samples=samples, data=data)
