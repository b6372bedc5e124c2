"""Flags that say what is compared: methods, budgets, schedule, protocol."""

import pathlib
from collections.abc import Mapping
from typing import cast

from absl import flags

import kvjax
from kvjax.cache.layers import KV_DTYPES
from kvjax.errors import InputError
from kvjax.experiments import candidates, cli, inputs, results
from kvjax.experiments.answering import QUERY_AGNOSTIC, QUERY_AWARE, Protocol
from kvjax.experiments.calibration.records import AUTO, FOLDER, Auto
from kvjax.experiments.candidates import Candidate
from kvjax.registry.names import get_recipe

_METHODS = flags.DEFINE_list(
  "methods",
  candidates.DEFAULT,
  "Methods or presets, with options as in keydiff:anchor=median_unit; by "
  "default those that are defined for --block and --every.",
)
_RETENTION = flags.DEFINE_list(
  "retention",
  ["1", "0.5", "0.25", "0.1"],
  "Shares of the context to keep, or to look up per token; auto is what a "
  "context can bear at --tau.",
)
_TAU = flags.DEFINE_float(
  "tau",
  0.95,
  "Share of quality that --retention=auto leaves; see "
  "kvjax.experiments.calibrate.",
)
_CALIBRATIONS = flags.DEFINE_string(
  "calibrations",
  None,
  "Folder of records that kvjax.experiments.calibrate has written; by default "
  f"{FOLDER} in the model's directory.",
)
_BUDGET = flags.DEFINE_list(
  "budget", None, "Tokens to keep or to look up, in place of --retention."
)
_BLOCK = flags.DEFINE_integer(
  "block",
  None,
  "Tokens per block of the prompt, evicting after each; by default the whole.",
  lower_bound=1,
)
_EVERY = flags.DEFINE_integer(
  "every",
  None,
  "Evict while decoding too, after every so many tokens.",
  lower_bound=1,
)
_HEADS = flags.DEFINE_enum(
  "heads",
  "kv",
  ["kv", "query"],
  "Whether each KV head decides, or each query head, with keys and values of "
  "its own.",
)
_KV_DTYPE = flags.DEFINE_enum(
  "kv_dtype",
  None,
  list(KV_DTYPES),
  "Holds what is kept in eight bits; by default as it was computed.",
)
_PROTOCOL = flags.DEFINE_enum(
  "protocol",
  QUERY_AGNOSTIC,
  [QUERY_AGNOSTIC, QUERY_AWARE],
  "Whether the question comes after the context has been compressed, or is "
  "prefilled with it; of a conversation, the first question.",
)


def check_flags() -> None:
  """Refuses flags that make others void.

  Raises:
    InputError: --retention stands beside --budget or --every beside --kv_dtype,
      or nothing is automatic and --tau or --calibrations is given.
  """
  cli.refuse_together("retention", ["budget"], "both say how much to keep")
  cli.refuse_together(
    "every",
    ["kv_dtype"],
    "a method chooses among keys as they were computed, not as they are stored",
  )
  for flag in (_TAU, _CALIBRATIONS):
    if flag.present and not _automatic():
      raise InputError(f"--{flag.name} is for --retention={AUTO}.")


def chosen() -> tuple[Candidate, ...]:
  """What is compared; see `candidates.candidates`."""
  own = _HEADS.value == "query"
  return candidates.candidates(
    _names(), budgets(), schedule(), own, _KV_DTYPE.value
  )


def _names() -> list[str]:
  names: list[str] = _METHODS.value
  if _METHODS.present or schedule().is_whole_prompt:
    return names
  return [name for name in names if _recurs(name)]


def _recurs(name: str) -> bool:
  """Whether a method is defined for evicting again and again."""
  recipe = get_recipe(name)
  refused = recipe.allocation or recipe.method.traits.whole_prompts_only
  return not refused


def budgets() -> list[kvjax.Budget | Auto]:
  """What --retention, or --budget in its place, asks for."""
  auto = _auto() if _automatic() else None
  return candidates.parse_budgets(_RETENTION.value, _BUDGET.value, auto)


def _automatic() -> bool:
  return AUTO in [text.strip() for text in _RETENTION.value]


def _auto() -> Auto:
  model = inputs.model_directory()
  beside = model.parent if model.is_file() else model
  folder = _CALIBRATIONS.value or beside / FOLDER
  return Auto.read(_TAU.value, pathlib.Path(folder), results.digest(model))


def schedule() -> kvjax.Schedule:
  """When is evicted."""
  return kvjax.Schedule(block=_BLOCK.value, every=_EVERY.value)


def protocol() -> Protocol:
  """Whether the question is known when the context is compressed."""
  return cast(Protocol, _PROTOCOL.value)


def settings(
  benchmark: str, data: Mapping[str, str], protocol: Protocol
) -> results.Settings:
  """What all answers of the run share.

  Args:
    benchmark: its name.
    data: where its texts come from, and other choices in words.
    protocol: what is known when a context is compressed.
  """
  return results.Settings(
    model=inputs.model_name(),
    weights=results.digest(inputs.model_directory()),
    dtype=inputs.dtype(),
    seed=inputs.SEED.value,
    benchmark=benchmark,
    data=data,
    protocol=protocol,
    schedule=str(schedule()),
    heads=f"{_HEADS.value} head",
    kv_dtype=_KV_DTYPE.value or "",
  )
