"""Flags for methods, budgets, schedule and protocol, and their values."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import cast

from absl import flags

import kvjax
from kvjax import models
from kvjax.cache.layers import KV_DTYPES
from kvjax.errors import InputError
from kvjax.experiments import refusals
from kvjax.experiments.calibration.record_files import AUTO, FOLDER, Auto
from kvjax.experiments.inputs import plugin_inputs, run_inputs
from kvjax.experiments.run import candidates, results
from kvjax.experiments.run.candidates import Candidate, Given
from kvjax.experiments.run.model_digest import digest
from kvjax.experiments.run.prompting import (
  QUERY_AGNOSTIC,
  QUERY_AWARE,
  QUERY_AWARE_KVPRESS,
  Protocol,
)
from kvjax.options.schedules import WHOLE
from kvjax.registry.names import split_budget

flags.adopt_module_key_flags(plugin_inputs)

# Among --methods, it stands for those that are taken by default.
_DEFAULT = "default"
_METHODS = flags.DEFINE_list(
  "methods",
  candidates.DEFAULT,
  "Methods or presets, with options as in keydiff:anchor=median_unit, and "
  "prefixes as in ada/snapkv; by default, those of this list that support "
  "--block and --every, and so in default,mine.",
)
_RETENTION = flags.DEFINE_list(
  "retention",
  ["1", "0.5", "0.25", "0.1"],
  "Shares of the context to keep, or to retrieve per token; 0.5+0.25 is a "
  "share for each of two layers; auto chooses the share of each context by "
  "--tau.",
)
_TAU = flags.DEFINE_float(
  "tau",
  0.95,
  "Share of quality that --retention=auto preserves; see kvjax calibrate.",
)
_CALIBRATIONS = flags.DEFINE_string(
  "calibrations",
  None,
  "Folder of records that kvjax calibrate has written; by default "
  f"{FOLDER} in the model's directory, or those that come with kvjax.",
)
_BUDGET = flags.DEFINE_list(
  "budget", None, "Tokens to keep or to retrieve, instead of --retention."
)
_THRESHOLD = flags.DEFINE_list(
  "threshold",
  None,
  "Lowest scores to keep, instead of --retention; for methods whose scores "
  "mean the same in all contexts, such as kvzap.",
)
_BLOCK = flags.DEFINE_integer(
  "block",
  None,
  "Prefill in blocks of this many tokens and evict after each; without it, the "
  "prompt is one block.",
  lower_bound=1,
)
_EVERY = flags.DEFINE_integer(
  "every",
  None,
  "Also evict while decoding, each time this many tokens have been added.",
  lower_bound=1,
)
_DECODING = flags.DEFINE_string(
  "decoding",
  None,
  "Method and budget of the evictions while decoding, as in keydiff@512, where "
  "they differ from the prompt's; --every says when.",
)
_HEADS = flags.DEFINE_enum(
  "heads",
  "kv",
  ["kv", "query"],
  "Whether each KV head selects tokens, or each query head with its own copy "
  "of keys and values.",
)
_KV_DTYPE = flags.DEFINE_enum(
  "kv_dtype",
  None,
  list(KV_DTYPES),
  "Store the cache in eight bits instead of the dtype of the computation.",
)
_PROTOCOL = flags.DEFINE_enum(
  "protocol",
  QUERY_AGNOSTIC,
  [QUERY_AGNOSTIC, QUERY_AWARE, QUERY_AWARE_KVPRESS],
  "Whether the question follows the compressed context or is compressed with "
  f"it; for conversations, the first question. {QUERY_AWARE} compresses the "
  f"whole prompt; {QUERY_AWARE_KVPRESS}, like query_aware in kvpress, does not "
  "compress the end of the turn and the start of the answer.",
)


def check_flags() -> None:
  """Rejects flags that contradict each other.

  Raises:
    InputError: two of --retention, --budget and --threshold are combined,
      --every with --kv_dtype, or --block with --decoding or a mesh that shares
      out whole prompts; or --tau or --calibrations is given without
      --retention=auto, or --decoding without --every.
  """
  for name, others in (
    ("retention", ["budget", "threshold"]),
    ("budget", ["threshold"]),
  ):
    refusals.refuse_together(name, others, "both say how much to keep")
  refusals.refuse_together(
    "every",
    ["kv_dtype"],
    "a method chooses among keys as they were computed, not as they are stored",
  )
  refusals.refuse_together(
    "decoding",
    ["block"],
    "another method evicts while decoding only from prompts read as a whole",
  )
  run_inputs.check_blocks(_BLOCK.value)
  if _DECODING.present and not _EVERY.present:
    raise InputError("--decoding says what evicts; give --every for when.")
  for flag in (_TAU, _CALIBRATIONS):
    if flag.present and not _automatic():
      raise InputError(f"--{flag.name} is for --retention={AUTO}.")


def chosen() -> tuple[Candidate, ...]:
  """Returns the candidates; see `candidates.candidates`."""
  per_query_head = _HEADS.value == "query"
  decoding = _decoding(per_query_head)
  of_prompts = schedule() if decoding is None else WHOLE
  return candidates.candidates(
    _names(of_prompts, per_query_head, decoding),
    budgets(),
    of_prompts,
    per_query_head,
    _KV_DTYPE.value,
    run_inputs.SEED.value,
    decoding,
  )


def _decoding(per_query_head: bool) -> kvjax.Plan | None:
  """The plan of --decoding, with the seed of --seed unless it has one."""
  if _DECODING.value is None:
    return None
  name, budget = split_budget(_DECODING.value)
  plan = kvjax.get_plan(
    name, budget, schedule=schedule(), per_query_head=per_query_head
  )
  return candidates.seeded(name, plan, run_inputs.SEED.value)


def _names(
  of_prompts: kvjax.Schedule, per_query_head: bool, decoding: kvjax.Plan | None
) -> list[str]:
  """Those of --methods, with those of its default that support the schedule."""
  default: list[str] = _METHODS.default
  given: list[str] = _METHODS.value if _METHODS.present else [_DEFAULT]

  def fits(name: str) -> bool:
    # No method refuses to keep everything.
    budget = kvjax.Retention(1.0)
    try:
      kvjax.get_plan(
        name,
        budget,
        schedule=of_prompts,
        per_query_head=per_query_head,
        decoding=decoding,
      )
    except InputError:
      return False
    return True

  return [
    name
    for one in given
    for name in (filter(fits, default) if one == _DEFAULT else [one])
  ]


def budgets() -> list[Given]:
  """Returns those of --retention, or of --budget or --threshold instead."""
  if _THRESHOLD.value is not None:
    return candidates.parse_thresholds(_THRESHOLD.value)
  auto = _auto() if _automatic() else None
  return candidates.parse_budgets(_RETENTION.value, _BUDGET.value, auto)


def _automatic() -> bool:
  return AUTO in [text.strip() for text in _RETENTION.value]


def _auto() -> Auto:
  model = run_inputs.model_directory()
  folder = pathlib.Path(_CALIBRATIONS.value or _records_of(model))
  return Auto.read(_TAU.value, folder, digest(model))


def _records_of(model: pathlib.Path) -> pathlib.Path:
  """Returns the records in a model's directory, or else those of kvjax."""
  beside = model.parent if model.is_file() else model
  folder = beside / FOLDER
  shipped = (
    pathlib.Path(models.__file__).parent / FOLDER / run_inputs.model_name()
  )
  return shipped if shipped.is_dir() and not folder.is_dir() else folder


def schedule() -> kvjax.Schedule:
  """Returns the eviction schedule."""
  return kvjax.Schedule(block=_BLOCK.value, every=_EVERY.value)


def _schedule_words() -> str:
  by = f" by {_DECODING.value}" if _DECODING.value is not None else ""
  return f"{schedule()}{by}"


def protocol() -> Protocol:
  """Returns whether the question is known before compression."""
  return cast(Protocol, _PROTOCOL.value)


def settings(
  benchmark: str, data: Mapping[str, str], protocol: Protocol
) -> results.Settings:
  """Returns the settings that all answers of the run share.

  Args:
    benchmark: name of the benchmark.
    data: sources of its texts, and other choices in words.
    protocol: whether the question is known before compression.
  """
  return dataclasses.replace(
    run_inputs.settings(),
    benchmark=benchmark,
    data=data,
    protocol=protocol,
    schedule=_schedule_words(),
    heads=f"{_HEADS.value} head",
    kv_dtype=_KV_DTYPE.value or "",
  )
