"""Measures the engine's compilation time by model depth.

  kvjax benchmark_compile

creates a Llama of SmolLM2-135M's sizes with random weights, with 4 and with 32
layers, and calls prefill and decode twice each for every method. The first call
compiles, the second only computes. With --sweep it also prefills for 40 plans
at once (13 methods at 3 retentions and the full cache) with SmolLM2's 30
layers. It prints a table:

- first call, later call: seconds;
- compiling: their difference;
- × 4 layers: compiling, relative to the smallest depth.

Compiled programs are not cached between runs. It takes four minutes on two
cores, five with --sweep.
"""

import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.box
import rich.console
import rich.progress
import rich.table
from absl import flags

import kvjax
from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.run.environment import device
from kvjax.experiments.timing.random_models import random_llama

_LAYERS = flags.DEFINE_list("layers", ["4", "32"], "Numbers of layers.")
_ROWS = flags.DEFINE_integer("rows", 4, "Prompts per batch.", lower_bound=1)
_LENGTH = flags.DEFINE_integer(
  "length", 1024, "Tokens of a prompt.", lower_bound=1
)
_NAMES = flags.DEFINE_list(
  "methods",
  ["keydiff", "pyramidkv", "adakv", "ctkvr"],
  "Methods, at a quarter of the tokens.",
)
_SWEEP = flags.DEFINE_bool("sweep", False, "Also prefill for 40 plans.")

# The methods of the demo, without the full cache.
_METHODS = (
  *("random", "streaming", "key_norm", "h2o", "tova", "snapkv", "pyramidkv"),
  *("adakv", "chunkkv", "keydiff", "lagkv:lag=128", "compactor", "protokv"),
)
_DEPTH = re.compile("[1-9][0-9]{0,3}")
_RETENTIONS = (0.5, 0.25, 0.1)
_SWEEP_LAYERS = 30
_TOKENS = 128


class Timed(NamedTuple):
  """Two calls of the same program.

  Attributes:
    name: name of the program.
    layers: L.
    first: seconds of the first call, which compiles.
    later: seconds of the second call.
  """

  name: str
  layers: int
  first: float
  later: float

  @property
  def compiling(self) -> float:
    """Extra seconds of the first call."""
    return self.first - self.later


def main() -> None:
  """Times first and later calls."""
  jax.config.update("jax_enable_compilation_cache", False)
  depths = _depths()
  if not _NAMES.value:
    raise InputError("--methods is empty; keydiff,adakv would be two.")
  jobs = [*depths, *([_SWEEP_LAYERS] if _SWEEP.value else [])]
  timed: list[Timed] = []
  console = rich.console.Console(highlight=False)
  for number, depth in enumerate(
    rich.progress.track(jobs, "Compiling", console=console, transient=True)
  ):
    jax.clear_caches()
    swept = number == len(depths)
    timed += list(_sweep(depth) if swept else _prefill_and_decode(depth))
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
  heading = ("program", "layers", "first call", "later call", "compiling")
  for name in (*heading, f"× {depths[0]} layers"):
    table.add_column(name, justify="left" if name == "program" else "right")
  for timing in timed:
    table.add_row(*_row(timing, timed))
  console.print(
    table,
    f"Seconds; {_ROWS.value} prompts of {_LENGTH.value} tokens, random weights "
    f"of SmolLM2-135M's sizes, float32 on {device(1)}, jax {jax.__version__}.",
  )


def _depths() -> list[int]:
  """Parses --layers, ascending.

  Raises:
    InputError: a value is no number of layers.
  """
  if not _LAYERS.value or not all(map(_DEPTH.fullmatch, _LAYERS.value)):
    raise InputError(
      "--layers takes numbers of layers such as 4,32; "
      f"{','.join(_LAYERS.value)[:60]!r} is not."
    )
  return sorted({int(depth) for depth in _LAYERS.value})


def _row(timing: Timed, timed: Sequence[Timed]) -> tuple[str, ...]:
  smallest = next(one for one in timed if one.name == timing.name)
  return (
    timing.name,
    str(timing.layers),
    f"{timing.first:.2f}",
    f"{timing.later:.2f}",
    f"{timing.compiling:.2f}",
    ""
    if timing is smallest
    else f"{timing.compiling / smallest.compiling:.2f}",
  )


def _model(layers: int) -> tuple[kvjax.Model, Any]:
  """Creates a decoder of SmolLM2-135M's sizes."""
  _, model, params = random_llama(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=layers,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rope_theta=100_000.0,
  )
  return model, jax.block_until_ready(params)


def _prompts(length: int) -> kvjax.Prompts:
  draw = np.random.default_rng(0)
  rows = draw.integers(0, 49_152, (_ROWS.value, length))
  return kvjax.Prompts.of(rows.tolist())


def _prefill_and_decode(layers: int) -> Iterator[Timed]:
  model, params = _model(layers)
  prompts, questions = _prompts(_LENGTH.value), _prompts(9)
  decoding = kvjax.Decoding(max_new_tokens=_TOKENS)
  for name in _NAMES.value:
    # Methods share some programs: time each from an empty cache.
    jax.clear_caches()
    plan = kvjax.get_plan(name, kvjax.Retention(0.25))
    prefilled, timed = _twice(
      f"{name}: prefill",
      layers,
      functools.partial(kvjax.prefill, model, params, prompts, plan),
    )
    yield timed
    yield _twice(
      f"{name}: question and {_TOKENS} tokens",
      layers,
      functools.partial(
        kvjax.generate, model, params, prefilled[0], questions, decoding
      ),
    )[1]


def _sweep(layers: int) -> Iterator[Timed]:
  model, params = _model(layers)
  prompts = _prompts(_LENGTH.value)
  plans = [
    kvjax.get_plan("full", kvjax.Retention(1.0)),
    *(
      kvjax.get_plan(name, kvjax.Retention(share))
      for name in _METHODS
      for share in _RETENTIONS
    ),
  ]
  yield _twice(
    f"sweep of {len(plans)} plans",
    layers,
    lambda: kvjax.sweep(model, params, prompts, plans)[1],
  )[1]


def _twice(
  name: str, layers: int, call: Callable[[], Any]
) -> tuple[Any, Timed]:
  seconds = []
  for _ in range(2):
    begin = time.perf_counter()
    result = call()
    jax.block_until_ready(jax.tree.leaves(result))
    seconds.append(time.perf_counter() - begin)
  return result, Timed(name, layers, *seconds)


if __name__ == "__main__":
  cli.run(main)
