"""Flags that say what is compared: methods, budgets, schedule, protocol."""

from collections.abc import Mapping
from typing import cast

from absl import flags

import kvjax
from experiments import cli, inputs, results
from experiments.answering import QUERY_AGNOSTIC, QUERY_AWARE, Protocol
from experiments.candidates import Candidate, candidates, parse_budgets
from kvjax.methods import METHODS

# LagKV's own default, a lag of 1,024, keeps all of so short a context.
_DEFAULT = [{"lagkv": "lagkv:lag=128"}.get(name, name) for name in METHODS]

_METHODS = flags.DEFINE_list(
  "methods",
  _DEFAULT,
  "Methods or presets, with options as in keydiff:anchor=median_unit.",
)
_RETENTION = flags.DEFINE_list(
  "retention",
  ["1", "0.5", "0.25", "0.1"],
  "Shares of the context to keep, or to look up per token.",
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
_PROTOCOL = flags.DEFINE_enum(
  "protocol",
  QUERY_AGNOSTIC,
  [QUERY_AGNOSTIC, QUERY_AWARE],
  "Whether the question comes after the context has been compressed, or is "
  "prefilled with it.",
)


def check_flags() -> None:
  """Refuses --retention beside --budget.

  Raises:
    InputError: both are given.
  """
  cli.refuse_together("retention", ["budget"], "both say how much to keep")


def chosen() -> tuple[Candidate, ...]:
  """What is compared; see `candidates`."""
  own = _HEADS.value == "query"
  return candidates(_METHODS.value, budgets(), schedule(), own)


def budgets() -> list[kvjax.Budget]:
  """What --retention, or --budget in its place, asks for."""
  return parse_budgets(_RETENTION.value, _BUDGET.value)


def schedule() -> kvjax.Schedule:
  """When is evicted."""
  return kvjax.Schedule(block=_BLOCK.value, every=_EVERY.value)


def protocol() -> Protocol:
  """Whether the question is known when the context is compressed."""
  return cast(Protocol, _PROTOCOL.value)


def settings(benchmark: str, data: Mapping[str, str]) -> results.Settings:
  """What all answers of the run share.

  Args:
    benchmark: its name.
    data: where its texts come from, and other choices in words.
  """
  return results.Settings(
    model=inputs.model_name(),
    weights=results.digest(inputs.model_directory()),
    dtype=inputs.dtype(),
    seed=inputs.SEED.value,
    benchmark=benchmark,
    data=data,
    protocol=protocol(),
    schedule=str(schedule()),
    heads=f"{_HEADS.value} head",
  )
