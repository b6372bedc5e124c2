"""Measures the engine's compilation time by model depth.

  kvjax benchmark_compile

creates a Llama of SmolLM2-135M's sizes with random weights, with 4 and with 32
layers, and calls prefill and decode twice each for every method. The first call
compiles, the second only computes. With --sweep it also prefills for 40 plans
at once (13 methods at 3 retentions and the full cache) with SmolLM2's 30
layers, or only that with an empty --methods. It prints a table and writes it to
table.md in --output:

- first call, later call: seconds;
- compiling: their difference;
- × 4 layers: compiling, relative to the smallest depth.

Compiled programs are not cached between runs. It takes four minutes on two
cores, five with --sweep.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags

import kvjax
from kvjax.experiments import cli, refusals
from kvjax.experiments.inputs.number_lists import parse_numbers
from kvjax.experiments.report import benchmark_tables, wording
from kvjax.experiments.run import outputs, progress_bar
from kvjax.experiments.run.environment import device
from kvjax.experiments.timing import compile_timing, random_models
from kvjax.experiments.timing.compile_timing import Timed, twice

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
_OUTPUT = flags.DEFINE_string("output", "results/compile", "Output folder.")

# Methods that see the prompt once, without the full cache.
_METHODS = (
  *("random", "streaming", "key_norm", "h2o", "tova", "snapkv", "pyramidkv"),
  *("adakv", "chunkkv", "keydiff", "lagkv:lag=128", "compactor", "protokv"),
)
_DEEPEST = 9999
_VOCABULARY = 49_152
_RETENTIONS = (0.5, 0.25, 0.1)
_SWEEP_LAYERS = 30
_TOKENS = 128


def main() -> None:
  """Times first and later calls."""
  jax.config.update("jax_enable_compilation_cache", False)
  example = "numbers of layers such as 4,32"
  depths = sorted(parse_numbers("layers", _LAYERS.value, example, _DEEPEST))
  if not _SWEEP.value:
    refusals.refuse_no_methods("keydiff,adakv")
  folder = outputs.folder(_OUTPUT.value)
  cli.announce()
  jobs = []
  if _NAMES.value:
    jobs += [functools.partial(_prefill_and_decode, depth) for depth in depths]
  if _SWEEP.value:
    jobs.append(functools.partial(_sweep, _SWEEP_LAYERS))
  timed: list[Timed] = []
  for job in progress_bar.track(jobs, "compiling"):
    jax.clear_caches()
    timed += list(job())
  benchmark_tables.show(
    folder,
    compile_timing.table(timed),
    f"Seconds; {wording.count(_ROWS.value, 'prompt')} of "
    f"{wording.count(_LENGTH.value, 'token')}, random weights of "
    f"SmolLM2-135M's sizes, float32 on {device(1)}",
  )


def _model(layers: int) -> tuple[kvjax.Model, Any]:
  """Creates a decoder of SmolLM2-135M's sizes."""
  _, model, params = random_models.random_llama(
    vocab_size=_VOCABULARY,
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
  return random_models.prompts(_VOCABULARY, _ROWS.value, length)


def _prefill_and_decode(layers: int) -> Iterator[Timed]:
  model, params = _model(layers)
  prompts, questions = _prompts(_LENGTH.value), _prompts(9)
  decoding = kvjax.Decoding(max_new_tokens=_TOKENS)
  for name in _NAMES.value:
    # Methods share some programs: time each from an empty cache.
    jax.clear_caches()
    plan = kvjax.get_plan(name, kvjax.Retention(0.25))
    prefilled, timed = twice(
      f"{name}: prefill",
      layers,
      functools.partial(kvjax.prefill, model, params, prompts, plan),
    )
    yield timed
    yield twice(
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
  yield twice(
    f"sweep of {len(plans)} plans",
    layers,
    lambda: kvjax.sweep(model, params, prompts, plans)[1],
  )[1]


if __name__ == "__main__":
  cli.run(main)
