"""Measures how long the engine compiles, by the depth of a model.

  python -m kvjax.experiments.benchmark_compile

makes a Llama of SmolLM2-135M's sizes with random weights, 4 and 32 layers deep,
and calls prefill and decode twice each for every method: the first call
compiles, the second only computes. With --sweep it also prefills for 40 plans
at once, 13 methods at 3 retentions and the full cache, at the depth of SmolLM2,
which is 30. Prints a table:

- first call, later call: seconds;
- compiling: their difference;
- × 4 layers: compiling, over that of the least depth.

Compiled programs are not kept between runs. Takes four minutes on two cores,
five with --sweep.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.box
import rich.console
import rich.progress
import rich.table
from absl import flags
from flax import nnx

import kvjax
from kvjax.experiments import cli
from kvjax.experiments.reports import device
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import from_decoder

_LAYERS = flags.DEFINE_list("layers", ["4", "32"], "Depths of the model.")
_ROWS = flags.DEFINE_integer("rows", 4, "Prompts of a batch.", lower_bound=1)
_LENGTH = flags.DEFINE_integer(
  "length", 1024, "Tokens of a prompt.", lower_bound=1
)
_NAMES = flags.DEFINE_list(
  "methods",
  ["keydiff", "pyramidkv", "adakv", "ctkvr"],
  "Methods, at a quarter of the tokens.",
)
_SWEEP = flags.DEFINE_bool("sweep", False, "Prefill for 40 plans, too.")

# Those of README's table but for the full cache.
_METHODS = (
  *("random", "streaming", "key_norm", "h2o", "tova", "snapkv", "pyramidkv"),
  *("adakv", "chunkkv", "keydiff", "lagkv:lag=128", "compactor", "protokv"),
)
_RETENTIONS = (0.5, 0.25, 0.1)
_SWEEP_LAYERS = 30
_TOKENS = 128


class Timed(NamedTuple):
  """Two calls of the same program.

  Attributes:
    name: of the program.
    layers: L.
    first: seconds of the first call, which compiles.
    later: seconds of the second.
  """

  name: str
  layers: int
  first: float
  later: float

  @property
  def compiling(self) -> float:
    """Seconds that the first call took longer."""
    return self.first - self.later


def main() -> None:
  """Times first and later calls."""
  jax.config.update("jax_enable_compilation_cache", False)
  depths = sorted({int(depth) for depth in _LAYERS.value})
  jobs = [*depths, *([_SWEEP_LAYERS] if _SWEEP.value else [])]
  timed: list[Timed] = []
  console = rich.console.Console(highlight=False)
  for number, depth in enumerate(
    rich.progress.track(jobs, "Compiling", console=console, transient=True)
  ):
    jax.clear_caches()
    swept = number == len(depths)
    timed += list(_sweep(depth) if swept else _prefill_and_decode(depth))
  shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
  heading = ("program", "layers", "first call", "later call", "compiling")
  for name in (*heading, f"× {depths[0]} layers"):
    shown.add_column(name, justify="left" if name == "program" else "right")
  for each in timed:
    shown.add_row(*_row(each, timed))
  console.print(
    shown,
    f"Seconds; {_ROWS.value} prompts of {_LENGTH.value} tokens, random weights "
    f"of SmolLM2-135M's sizes, float32 on {device(1)}, jax {jax.__version__}.",
  )


def _row(each: Timed, timed: Sequence[Timed]) -> tuple[str, ...]:
  least = next(one for one in timed if one.name == each.name)
  return (
    each.name,
    str(each.layers),
    f"{each.first:.2f}",
    f"{each.later:.2f}",
    f"{each.compiling:.2f}",
    "" if each is least else f"{each.compiling / least.compiling:.2f}",
  )


def _model(layers: int) -> tuple[kvjax.Model, Any]:
  """A decoder of SmolLM2-135M's sizes, its weights computed."""
  config = DecoderConfig.from_hf(
    dict(
      model_type="llama",
      vocab_size=49_152,
      hidden_size=576,
      intermediate_size=1536,
      num_hidden_layers=layers,
      num_attention_heads=9,
      num_key_value_heads=3,
      max_position_embeddings=8192,
      rms_norm_eps=1e-5,
      rope_theta=100_000.0,
      tie_word_embeddings=True,
      hidden_act="silu",
      attention_bias=False,
      bos_token_id=1,
      eos_token_id=2,
    )
  )
  model, params = from_decoder(
    Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
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
    # Methods share what does not depend on them.
    jax.clear_caches()
    plan = kvjax.get_plan(name, kvjax.Retention(0.25))
    found, timed = _twice(
      f"{name}: prefill",
      layers,
      functools.partial(kvjax.prefill, model, params, prompts, plan),
    )
    yield timed
    yield _twice(
      f"{name}: question and {_TOKENS} tokens",
      layers,
      functools.partial(
        kvjax.generate, model, params, found[0], questions, decoding
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
    found = call()
    jax.block_until_ready(jax.tree.leaves(found))
    seconds.append(time.perf_counter() - begin)
  return found, Timed(name, layers, *seconds)


if __name__ == "__main__":
  cli.run(main)
